"""How far the hardware would let a row go: what its forwards alone take, and the oracle's.

The forwards of the widths that occurred are timed between the repeats of a race, in the same
process, so that a change of the machine's load meets both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import pandas as pd
import torch

from specdec_core.config import Document
from specdec_core.cost import oracle_counts
from specdec_core.models.alignment import Trajectory, measure_alignment
from specdec_core.models.fingerprints import TARGET
from specdec_core.models.pair import Pair
from specdec_core.models.runner import ModelRunner
from specdec_core.studies.bench.result import (
    OURS,
    BenchResult,
    Effort,
    Forwards,
    OracleLimit,
    Row,
    Take,
)

PARTS = {  # of a token's time, and what they are called
    "target_forward": "target forwards",
    "draft_forward": "draft forwards",
    "policy": "policy",
    "verify": "verification",
    "bookkeeping": "bookkeeping",
    "prefill": "prefill",
    "outside": "outside rounds",
}
TIMES = 15  # that a width is timed in each repeat, all widths in turns


class Split(Document):
    """Seconds of an output token by where they went; but for the last they add up to the token's
    whole time. `alone` is what the same forwards, and the prefill, take by themselves."""

    prefill: float
    target_forward: float
    draft_forward: float
    policy: float
    verify: float
    bookkeeping: float
    outside: float  # of no round: entering, leaving, the text
    alone: float

    @property
    def whole(self) -> float:
        return self.prefill + self.rounds + self.outside

    @property
    def rounds(self) -> float:
        return self.target_forward + self.draft_forward + self.beside

    @property
    def beside(self) -> float:
        """Of the rounds, what is no forward."""
        return self.policy + self.verify + self.bookkeeping

    @property
    def beside_share(self) -> float:
        """The part of the rounds that is no forward; NaN where rounds took no time."""
        return self.beside / self.rounds if self.rounds else float("nan")

    @property
    def of_forwards(self) -> float:
        """The speed as a share of what the forwards alone would allow."""
        return self.alone / self.whole


@dataclass
class ForwardClock:
    """Times forwards of a pair's models on runners of its own, at one context."""

    pair: Pair
    context: int
    samples: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    _runners: dict[str, ModelRunner] = field(default_factory=dict)

    def measure(self, widths: Mapping[str, Iterable[int]], times: int = TIMES) -> None:
        """Add `times` samples of every width of every model, by "target" or the draft's name.
        Widths that do not fit behind the context are left out."""
        room = self.pair.max_length - self.context
        shapes = [(m, w) for m, own in widths.items() for w in sorted(set(own)) if w <= room]
        forwards = [(m, w, self._forward(m, w)) for m, w in shapes]
        for _, _, forward in forwards:
            forward()
        for _ in range(times):
            for model, width, forward in forwards:
                start = perf_counter()
                forward()
                taken = perf_counter() - start
                self.samples.setdefault(model, {}).setdefault(width, []).append(taken)

    def forwards(self) -> dict[str, Forwards]:
        """What was measured: medians."""
        return {
            model: Forwards(
                context=self.context,
                seconds={width: statistics.median(own) for width, own in sorted(widths.items())},
            )
            for model, widths in self.samples.items()
        }

    def _forward(self, model: str, width: int) -> Callable[[], None]:
        if model not in self._runners:
            self._runners[model] = self._open(model)
        runner, tokens = self._runners[model], [[0] * width]

        def forward() -> None:
            runner.forward([0], tokens)
            if runner.device.type == "cuda":
                torch.cuda.synchronize(runner.device)
            runner.truncate(0, self.context)

        return forward

    def _open(self, model: str) -> ModelRunner:
        runner = self.pair.open_runner(None if model == TARGET else model, 1)
        runner.prefill([0], [[0] * self.context])
        return runner


def widths_of(rows: Iterable[Row], pair: Pair) -> dict[str, set[int]]:
    """The widths of forwards that own rows ran and the oracle needs, by model. A draft model's are
    known as their mean in a take, whose neighbours are taken."""
    found: dict[str, set[int]] = {TARGET: {1, 2}, **{name: {1, 2} for name in pair.drafts}}
    for row in rows:
        draft = row.configuration.draft_of(pair.drafts) if row.configuration is not None else None
        for effort in _efforts(row):
            found[TARGET] |= set(effort.widths)
            if draft is not None and effort.draft_forwards:
                mean = int(_draft_width(effort))
                found[draft] |= {mean, mean + 1}
    return found


def split(row: Row, forwards: Mapping[str, Forwards], draft: str | None) -> Split | None:
    """Where the time of a row of ours went, over all its takes; None where forwards of its models
    were not measured."""
    efforts = _efforts(row)
    if not efforts or TARGET not in forwards:
        return None
    run = sum(effort.draft_forwards for effort in efforts)
    drafts = 0.0
    if run:
        if draft is None or draft not in forwards:
            return None
        drafts = sum(e.draft_forwards * forwards[draft].at(_draft_width(e)) for e in efforts)
    target = sum(
        count * forwards[TARGET].at(width)
        for effort in efforts
        for width, count in effort.widths.items()
    )
    takes = [take for own in row.takes for take in own]
    tokens = max(sum(take.tokens for take in takes), 1)
    parts = {part: sum(e.seconds[part] for e in efforts) / tokens for part in efforts[0].seconds}
    whole = sum(sum(take.seconds) for take in takes) / tokens
    return Split(
        **parts,
        outside=whole - sum(parts.values()),
        alone=parts["prefill"] + (target + drafts) / tokens,
    )


def oracle_limits(
    pair: Pair,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    forwards: Mapping[str, Forwards],
) -> list[OracleLimit]:
    """The oracle of each draft over `texts`, each a prompt and the target's own greedy tokens."""
    device = pair.target.device
    trajectories = [
        Trajectory(torch.tensor([*prompt, *output], device=device), len(prompt))
        for prompt, output in texts
        if output
    ]
    if not trajectories:
        return []
    found = []
    for name, draft in pair.drafts.items():
        if name not in forwards:
            continue
        counts = oracle_counts(
            [measure_alignment(pair.target, draft, [t]).disagreements for t in trajectories],
            [t.generated for t in trajectories],
        )
        width = 1 + counts.n_drafted / counts.n_target
        seconds = counts.n_target * forwards[TARGET].at(width)
        seconds += counts.n_draft * forwards[name].at(1)
        found.append(
            OracleLimit(
                draft=name,
                verification_rate=counts.n_target / counts.n,
                seconds_per_token=seconds / counts.n,
            )
        )
    return found


def of_oracle(result: BenchResult, row: Row, draft: str | None) -> float | None:
    """A greedy row's speed as a share of the oracle's with the same draft, to which the row's own
    prefill is added; None without an oracle."""
    oracle = next((own for own in result.oracles if own.draft == draft), None)
    efforts = _efforts(row)
    if oracle is None or row.temperature or not efforts:
        return None
    takes: list[Take] = [take for own in row.takes for take in own]
    tokens = max(sum(take.tokens for take in takes), 1)
    prefill = sum(effort.seconds["prefill"] for effort in efforts) / tokens
    whole = sum(sum(take.seconds) for take in takes) / tokens
    return (oracle.seconds_per_token + prefill) / whole


def limits(result: BenchResult, row: Row) -> tuple[Split | None, float | None]:
    """Where a row's time went, and its speed as a share of the oracle's; None where unknown."""
    if row.configuration is None:
        return None, None
    draft = row.configuration.draft_of(result.pair.drafts)
    return split(row, result.forwards, draft), of_oracle(result, row, draft)


def limits_frame(result: BenchResult, temperature: float) -> pd.DataFrame:
    """One row for each of ours that ran rounds, the fastest first: milliseconds of a token by where
    they went, and the speed as a share of what its forwards alone would allow and of the
    oracle's."""
    rows = []
    for row in result.at(temperature, OURS):
        parts, oracle = limits(result, row)
        if parts is not None:
            rows.append(
                {
                    "contestant": row.name,
                    "temperature": temperature,
                    "ms_per_token": 1e3 * parts.whole,
                    "of_forwards": parts.of_forwards,
                    "of_oracle": oracle,
                    "beside_forwards": parts.beside_share,
                    **{f"{name}_ms": 1e3 * getattr(parts, name) for name in PARTS},
                }
            )
    frame = pd.DataFrame(rows)
    return frame.sort_values("ms_per_token").reset_index(drop=True) if rows else frame


def _efforts(row: Row) -> list[Effort]:
    return [take.effort for own in row.takes for take in own if take.effort is not None]


def _draft_width(effort: Effort) -> float:
    """Mean width of the draft model's forwards: one in a chain, more in a tree."""
    return max(effort.draft_tokens / effort.draft_forwards, 1.0) if effort.draft_forwards else 1.0
