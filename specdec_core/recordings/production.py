"""What a production server tells about its speculation, without its weights or its texts.

vLLM writes how many candidates were accepted at each position and how long its steps took: as
Prometheus text at `/metrics`, or, with `--enable-per-request-metrics` and
`--per-request-spec-decode-metrics summary`, in each response. How many candidates were accepted at
the first k positions is what a shorter chain would have had, if acceptance at a position does not
depend on where rounds begin. Of longer chains nothing is known; they are taken to continue at the
last position's rate.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.config import Value
from specdec_core.cost import Profile, draft_key
from specdec_core.cost.fitting import nonnegative_least_squares

_DRAFTS = "vllm:spec_decode_num_drafts"
_CANDIDATES = "vllm:spec_decode_num_draft_tokens"
_POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos"
_STEPS = "vllm:inter_token_latency_seconds"  # of a request, between what two steps gave it


class Production(Value):
    """Steps of all requests of a server, summed up. Of `steps`, `proposed` had candidates, of which
    those at each position were `accepted`; `length` is the most that a step had. `seconds` are a
    step's as its request saw it, other requests' prompts included."""

    length: int
    steps: int
    proposed: int
    candidates: int
    accepted: tuple[int, ...]
    seconds: float

    @property
    def varied(self) -> bool:
        """Whether some steps had fewer candidates than other steps: the server's length varied, or
        its drafter found fewer."""
        return self.candidates < self.proposed * self.length

    @property
    def surviving(self) -> np.ndarray:
        """The share of steps that accepted a first, a second, … candidate."""
        return np.array(self.accepted) / max(self.steps, 1)

    def tokens(self, length: int) -> float:
        """Expected tokens of a step that proposes up to `length` candidates."""
        surviving = self.surviving
        known = float(surviving[:length].sum())
        if length <= len(surviving) or not len(surviving):
            return 1 + known
        before = surviving[-2] if len(surviving) > 1 else self.proposed / max(self.steps, 1)
        rate = min(float(surviving[-1] / before), 1.0) if before else 0.0
        beyond = surviving[-1] * sum(rate**n for n in range(1, length - len(surviving) + 1))
        return 1 + known + float(beyond)

    @property
    def speed(self) -> float:
        """Tokens a second of a request."""
        return self.tokens(self.length) / self.seconds


class Expectation(Value):
    """What a length is expected to give: tokens of a step, its seconds where anything tells them,
    and whether that length was seen or lies beyond."""

    length: int
    tokens: float
    seconds: float | None
    beyond: bool

    @property
    def speed(self) -> float | None:
        """Tokens a second of a request."""
        return self.tokens / self.seconds if self.seconds else None


def expectations(
    seen: Sequence[Production],
    lengths: Iterable[int],
    profile: Profile | None = None,
    draft: str | None = None,
) -> list[Expectation]:
    """What other lengths are expected to give than the servers' that were `seen`.

    A step's seconds at another length follow from servers of several lengths, by a line through
    them; else from a `profile` of such a server with `draft`, which says how they change; else they
    are not known, but for the lengths seen. Acceptance is that of the server with the longest.
    """
    longest = max(seen, key=lambda each: each.length)
    own = {each.length: each.seconds for each in seen}
    line = _line(own) if len(own) > 1 else None
    found = []
    for length in sorted({*lengths, *own}):
        seconds = own.get(length)
        if seconds is None and line is not None:
            seconds = line[0] + line[1] * length
        elif seconds is None and profile is not None:
            whole = (_step(profile, draft, n) for n in (length, longest.length))
            seconds = longest.seconds * next(whole) / next(whole)
        found.append(
            Expectation(
                length=length,
                tokens=longest.tokens(length),
                seconds=seconds,
                beyond=length > longest.length,
            )
        )
    return found


def save(seen: Sequence[Production], path: Path) -> Path:
    return write_atomically(path, json.dumps([s.model_dump(mode="json") for s in seen], indent=1))


def read_vllm(path: Path) -> Production:
    """What vLLM wrote: the text at `/metrics`, or a response with `metrics` a line.

    Raises:
        UserError: the file is missing, or tells nothing of speculation.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if text.lstrip()[:1] == "{":
        return _of_responses(text, path)
    return _of_metrics(text, path)


def _of_metrics(text: str, path: Path) -> Production:
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for name, labels, value, *_ in family.samples:
                if name == f"{_POSITIONS}_total":
                    place = int(labels["position"])
                    positions[place] = positions.get(place, 0) + value
                else:
                    sums[name] = sums.get(name, 0) + value
    except (ValueError, KeyError) as error:
        raise UserError(f"{path}: neither Prometheus text nor JSON lines: {error}") from None
    names = (f"{_DRAFTS}_total", f"{_CANDIDATES}_total", f"{_STEPS}_count", f"{_STEPS}_sum")
    if missing := [name for name in names if not sums.get(name)]:
        raise UserError(
            f"{path}: no {missing[0]} in it: take the text at /metrics of a vLLM that speculates,"
            " without --disable-log-stats, when it has answered requests"
        )
    drafts, candidates, steps, seconds = (sums[name] for name in names)
    return Production(
        length=len(positions),
        steps=int(steps),
        proposed=min(int(drafts), int(steps)),
        candidates=int(candidates),
        accepted=tuple(int(positions.get(place, 0)) for place in range(len(positions))),
        seconds=seconds / steps,
    )


def _of_responses(text: str, path: Path) -> Production:
    total: list[Production] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            if (one := _of_response(json.loads(line))) is not None:
                total.append(one)
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path}:{number}: expected a response of vLLM with `usage` and `metrics`"
                f" ({type(error).__name__}: {error})"
            ) from None
    if not total:
        raise UserError(
            f"{path}: no response has metrics.speculative_decoding: start vLLM with"
            " --enable-per-request-metrics --per-request-spec-decode-metrics summary"
        )
    lengths = sorted({each.length for each in total})
    if len(lengths) > 1:
        raise UserError(
            f"{path}: responses with num_spec_tokens {' and '.join(map(str, lengths))}: take a file"
            " for each length, of a vLLM without num_speculative_tokens_per_batch_size"
        )
    [length], steps = lengths, sum(each.steps for each in total)
    accepted = [[*each.accepted, *[0] * (length - len(each.accepted))] for each in total]
    return Production(
        length=length,
        steps=steps,
        proposed=sum(each.proposed for each in total),
        candidates=sum(each.candidates for each in total),
        accepted=tuple(int(n) for n in np.sum(accepted, axis=0)),
        seconds=sum(each.seconds * each.steps for each in total) / steps,
    )


def _of_response(response: Mapping[str, Any]) -> Production | None:
    """One response; None where it tells nothing, or is of a single step."""
    metrics = response["metrics"] or {}
    told = metrics.get("speculative_decoding")
    milliseconds = metrics.get("generation_time_ms")
    if not told or not milliseconds:
        return None
    by_accepted = told["acceptance_histogram"]
    accepted = tuple(sum(by_accepted[n:]) for n in range(1, len(by_accepted)))
    # Each step adds its accepted candidates and one token; the first token is the prompt's. Of the
    # last step's, which are counted, those beyond the text's end are not written.
    with_candidates = int(told["num_spec_steps"])
    steps = max(response["usage"]["completion_tokens"] - 1 - sum(accepted), with_candidates)
    if steps < 1:
        return None
    return Production(
        length=int(told["num_spec_tokens"]),
        steps=steps,
        proposed=with_candidates,
        candidates=int(told["num_draft_tokens"]),
        accepted=accepted,
        seconds=milliseconds / 1e3 / steps,
    )


def _line(seconds: Mapping[int, float]) -> tuple[float, float]:
    columns = np.column_stack([np.ones(len(seconds)), list(seconds)])
    once, each = nonnegative_least_squares(columns, np.array(list(seconds.values())))
    return float(once), float(each)


def _step(profile: Profile, draft: str | None, length: int) -> float:
    """Seconds of a step by a profile, with a chain of `draft` or, for None, of a lookup."""
    seconds = profile.t_target(1 + length) + profile.round_overhead
    if draft is None:
        return seconds
    return seconds + length * profile.t_draft(draft) + profile.proposals.get(draft_key(draft), 0.0)
