"""What vLLM's metrics tell of its speculation.

vLLM writes the number of accepted candidates at each position and the time of its steps: as
Prometheus text at `/metrics`, or in each response, with `--enable-per-request-metrics` and
`--per-request-spec-decode-metrics summary`. Where the length varies, newer versions also count the
steps of each length (`acceptance_histogram_by_draft_length`, vllm#56278).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from specdec_core.base.errors import UserError
from specdec_core.servers.acceptance import Production

_DRAFTS = "vllm:spec_decode_num_drafts"
_CANDIDATES = "vllm:spec_decode_num_draft_tokens"
_POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos"
_BY_LENGTH = "acceptance_histogram_by_draft_length"  # of a response
_STEPS = "vllm:inter_token_latency_seconds"  # of a request, between the tokens of two steps


def read_metrics(path: Path) -> Production:
    """Parse the text at `/metrics`, or a file with a response with `metrics` on each line.

    Raises:
        UserError: the file is missing, or has nothing of speculation.
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
        except (ValueError, TypeError, KeyError, AttributeError) as error:
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
    return Production(
        length=length,
        steps=steps,
        proposed=sum(each.proposed for each in total),
        candidates=sum(each.candidates for each in total),
        accepted=_summed([(0,) * length, *(each.accepted for each in total)]),
        seconds=sum(each.seconds * each.steps for each in total) / steps,
        reached=_summed([each.reached for each in total]) if all(e.reached for e in total) else (),
    )


def _summed(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def _reached(by_length: Mapping[str, Sequence[int]], length: int) -> tuple[int, ...]:
    """By position, the steps that had a candidate there and accepted all before it. `by_length` has
    for each length the steps that accepted none, one, … of its candidates."""
    longest = {int(k): steps for k, steps in by_length.items()}
    return tuple(
        sum(sum(steps[n - 1 :]) for k, steps in longest.items() if k >= n)
        for n in range(1, length + 1)
    )


def _of_response(response: Mapping[str, Any]) -> Production | None:
    """One response; None for one without metrics, or of a single step."""
    metrics = response["metrics"] or {}
    told = metrics.get("speculative_decoding")
    milliseconds = metrics.get("generation_time_ms")
    if not told or not milliseconds:
        return None
    by_accepted = told["acceptance_histogram"]
    accepted = tuple(sum(by_accepted[n:]) for n in range(1, len(by_accepted)))
    # Each step adds its accepted candidates and one token; the first token is the prefill's. The
    # accepted candidates of the last step count beyond the sequence's end, too.
    with_candidates = int(told["num_spec_steps"])
    steps = max(response["usage"]["completion_tokens"] - 1 - sum(accepted), with_candidates)
    if steps < 1:
        return None
    length, by_length = int(told["num_spec_tokens"]), told.get(_BY_LENGTH)
    return Production(
        length=length,
        steps=steps,
        proposed=with_candidates,
        candidates=int(told["num_draft_tokens"]),
        accepted=accepted,
        seconds=milliseconds / 1e3 / steps,
        reached=_reached(by_length, length) if by_length else (),
    )
