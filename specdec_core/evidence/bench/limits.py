"""The limits of a row's speed on this hardware: its forwards alone, and the oracle's.

Forwards of the widths that occurred are timed between the repeats of a race, in the same process,
so that the machine's load falls on both alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import pandas as pd
import torch

from specdec_core.config import Document
from specdec_core.cost import oracle_counts
from specdec_core.evidence.bench.result import (
    BenchResult,
    BenchRow,
    Effort,
    ForwardMilliseconds,
    OracleLimit,
    Take,
)
from specdec_core.measure.comparison import OURS
from specdec_core.models.alignment import Trajectory, measure_alignment
from specdec_core.models.fingerprints import TARGET
from specdec_core.models.pair import Pair
from specdec_core.models.runner import Batch, ModelRunner

PARTS = {  # of a token's time, and their titles
    "target_forward": "target forwards",
    "draft_forward": "draft forwards",
    "policy": "policy",
    "verify": "verification",
    "bookkeeping": "bookkeeping",
    "prefill": "prefill",
    "outside": "outside rounds",
}
TIMES = 15  # samples of a width in each repeat, all widths in turns


class Split(Document):
    """Seconds of an output token, by part. All but `alone` add up to the token's whole time;
    `alone` is the time of the prefill and of the same forwards measured alone."""

    prefill: float
    target_forward: float
    draft_forward: float
    policy: float
    verify: float
    bookkeeping: float
    outside: float  # outside rounds: opening and closing requests, the text
    alone: float

    @property
    def whole(self) -> float:
        return self.prefill + self.rounds + self.outside

    @property
    def rounds(self) -> float:
        return self.target_forward + self.draft_forward + self.beyond_forwards

    @property
    def beyond_forwards(self) -> float:
        """Time of the rounds outside their forwards."""
        return self.policy + self.verify + self.bookkeeping

    @property
    def beyond_forwards_share(self) -> float:
        """Share of the rounds outside their forwards; NaN where rounds took no time."""
        return self.beyond_forwards / self.rounds if self.rounds else float("nan")

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
        Widths that do not fit after the context are left out."""
        room = self.pair.max_length - self.context
        forwards = [
            (model, width, self._forward(model, width))
            for model, of_model in widths.items()
            for width in sorted(set(of_model))
            if width <= room
        ]
        for _, _, forward in forwards:
            forward()
        for _ in range(times):
            for model, width, forward in forwards:
                start = perf_counter()
                forward()
                taken = perf_counter() - start
                self.samples.setdefault(model, {}).setdefault(width, []).append(taken)

    def forwards(self) -> dict[str, ForwardMilliseconds]:
        """The medians of all samples."""
        return {
            model: ForwardMilliseconds(
                context=self.context,
                seconds={width: statistics.median(taken) for width, taken in sorted(times.items())},
            )
            for model, times in self.samples.items()
        }

    def _forward(self, model: str, width: int) -> Callable[[], None]:
        if model not in self._runners:
            self._runners[model] = self._open(model)
        runner, tokens = self._runners[model], [[0] * width]

        def forward() -> None:
            runner.forward(Batch([0], tokens))
            if runner.device.type == "cuda":
                torch.cuda.synchronize(runner.device)
            runner.truncate(0, self.context)

        return forward

    def _open(self, model: str) -> ModelRunner:
        target = model == TARGET
        runner = self.pair.open_runner(None, 1) if target else self.pair.open_alone(model, 1)
        runner.prefill([0], [[0] * self.context])
        return runner


def widths_of(rows: Iterable[BenchRow], pair: Pair) -> dict[str, set[int]]:
    """The widths of forwards that our rows ran and the oracle needs, by model. Of a draft model's
    only their mean in a take is known: the two widths around it."""
    widths: dict[str, set[int]] = {TARGET: {1, 2}, **{name: {1, 2} for name in pair.drafts}}
    for row in rows:
        draft = row.configuration.draft_of(pair.drafts) if row.configuration is not None else None
        for effort in _efforts(row):
            widths[TARGET] |= set(effort.widths)
            if draft is not None and effort.draft_forwards:
                mean = int(_draft_width(effort))
                widths[draft] |= {mean, mean + 1}
    return widths


def split(
    row: BenchRow, forwards: Mapping[str, ForwardMilliseconds], draft: str | None
) -> Split | None:
    """The time of one of our rows by part, over all its takes; None where forwards of its models
    were not measured."""
    efforts = _efforts(row)
    if not efforts or TARGET not in forwards:
        return None
    drafts = 0.0
    if any(effort.draft_forwards for effort in efforts):
        if draft is None or draft not in forwards:
            return None
        drafts = sum(e.draft_forwards * forwards[draft].at(_draft_width(e)) for e in efforts)
    target = sum(
        count * forwards[TARGET].at(width)
        for effort in efforts
        for width, count in effort.widths.items()
    )
    tokens = _tokens(row)
    parts = {part: sum(e.seconds[part] for e in efforts) / tokens for part in efforts[0].seconds}
    return Split(
        **parts,
        outside=_seconds(row) / tokens - sum(parts.values()),
        alone=parts["prefill"] + (target + drafts) / tokens,
    )


def oracle_limits(
    pair: Pair,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    forwards: Mapping[str, ForwardMilliseconds],
) -> list[OracleLimit]:
    """The oracle of each draft over `texts`, each a prompt and the target's greedy tokens. Of these
    the first is the prefill's."""
    device = pair.target.device
    trajectories = [
        Trajectory(torch.tensor([*prompt, *output], device=device), len(prompt) + 1)
        for prompt, output in texts
        if len(output) > 1
    ]
    if not trajectories:
        return []
    tokens = sum(len(output) for _, output in texts)
    oracles = []
    for name, draft in pair.draft_models.items():
        if name not in forwards:
            continue
        counts = oracle_counts(
            [measure_alignment(pair.target, draft, [t]).disagreements for t in trajectories],
            [t.generated for t in trajectories],
        )
        width = 1 + counts.n_drafted / counts.n_target
        seconds = counts.n_target * forwards[TARGET].at(width)
        seconds += counts.n_draft * forwards[name].at(1)
        oracles.append(
            OracleLimit(
                draft=name,
                verification_rate=counts.n_target / counts.n,
                seconds_per_token=seconds / tokens,
            )
        )
    return oracles


def of_oracle(result: BenchResult, row: BenchRow, draft: str | None) -> float | None:
    """A greedy row's speed as a share of the oracle's with the same draft and the row's prefill;
    None without an oracle."""
    oracle = next((limit for limit in result.oracles if limit.draft == draft), None)
    efforts = _efforts(row)
    if oracle is None or row.temperature or not efforts:
        return None
    tokens = _tokens(row)
    prefill = sum(effort.seconds["prefill"] for effort in efforts) / tokens
    return (oracle.seconds_per_token + prefill) / (_seconds(row) / tokens)


def limits(result: BenchResult, row: BenchRow) -> tuple[Split | None, float | None]:
    """A row's time by part, and its speed as a share of the oracle's; None where unknown."""
    if row.configuration is None:
        return None, None
    draft = row.configuration.draft_of(result.pair.drafts)
    return split(row, result.forwards, draft), of_oracle(result, row, draft)


def limits_frame(result: BenchResult, temperature: float) -> pd.DataFrame:
    """One row for each of ours that ran rounds, the fastest first: milliseconds of a token by part,
    and the speed as a share of that of its forwards alone and of the oracle's."""
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
                    "beside_forwards": parts.beyond_forwards_share,
                    **{f"{name}_ms": 1e3 * getattr(parts, name) for name in PARTS},
                }
            )
    frame = pd.DataFrame(rows)
    return frame.sort_values("ms_per_token").reset_index(drop=True) if rows else frame


def _takes(row: BenchRow) -> Iterator[Take]:
    return (take for repeat in row.takes for take in repeat)


def _efforts(row: BenchRow) -> list[Effort]:
    return [take.effort for take in _takes(row) if take.effort is not None]


def _tokens(row: BenchRow) -> int:
    return max(sum(take.tokens for take in _takes(row)), 1)


def _seconds(row: BenchRow) -> float:
    return sum(sum(take.seconds) for take in _takes(row))


def _draft_width(effort: Effort) -> float:
    """Mean width of the draft model's forwards: one in a chain, more in a tree."""
    return max(effort.draft_tokens / effort.draft_forwards, 1.0) if effort.draft_forwards else 1.0
