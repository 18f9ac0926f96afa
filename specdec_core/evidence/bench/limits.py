"""The limits of a row's speed on this hardware: its forwards alone, and the oracle's.

Forwards of the widths that occurred are timed between the repeats, in the same process, so that a
change of the machine's load falls on both alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd
import torch

from specdec_core.cost import oracle_counts
from specdec_core.evidence.bench.result import (
    BenchResult,
    BenchRow,
    Effort,
    ForwardMilliseconds,
    OracleLimit,
)
from specdec_core.measure.comparison import OURS
from specdec_core.measure.profiling import fill, time_forward
from specdec_core.models.alignment import Trajectory, measure_alignment
from specdec_core.models.fingerprints import TARGET
from specdec_core.models.pair import Pair
from specdec_core.models.runner import ModelRunner

PARTS = {  # of a token's time, and their titles
    "target_forward": "target forwards",
    "draft_forward": "draft forwards",
    "policy": "policy",
    "verify": "verification",
    "bookkeeping": "bookkeeping",
    "prefill": "prefill",
    "outside": "outside rounds",
}
TIMES = 15  # samples of a width in each repeat, all widths interleaved


@dataclass(frozen=True)
class Split:
    """Seconds of an output token by each of :data:`PARTS`, which add up to the token's whole time;
    `outside` rounds requests are opened and closed, and tokens become text. `alone` are the seconds
    of the prefill and of the same forwards measured alone."""

    parts: dict[str, float]
    alone: float

    @property
    def whole(self) -> float:
        return sum(self.parts.values())

    @property
    def beyond_forwards_share(self) -> float:
        """Share of the rounds outside their forwards; NaN where rounds took no time."""
        beyond = sum(self.parts[name] for name in ("policy", "verify", "bookkeeping"))
        rounds = beyond + self.parts["target_forward"] + self.parts["draft_forward"]
        return beyond / rounds if rounds else float("nan")

    @property
    def of_forwards(self) -> float:
        """The speed as a share of what the forwards alone would allow."""
        return self.alone / self.whole


@dataclass
class ForwardClock:
    """Times forwards of a pair's models on separate runners, at one context."""

    pair: Pair
    context: int
    samples: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    _runners: dict[str, ModelRunner] = field(default_factory=dict)

    def measure(self, widths: Mapping[str, Iterable[int]], times: int = TIMES) -> None:
        """Add `times` samples of every width of every model, by "target" or the draft's name.
        Widths that do not fit after the context are left out."""
        room = self.pair.max_length - self.context
        forwards = [
            (model, width)
            for model, of_model in widths.items()
            for width in sorted(set(of_model))
            if width <= room
        ]
        for repeat in range(times + 1):  # the first one warms up
            for model, width in forwards:
                seconds = time_forward(self._runner(model), width, 1)
                if repeat:
                    of_model = self.samples.setdefault(model, {})
                    of_model.setdefault(width, []).append(seconds)

    def forwards(self) -> dict[str, ForwardMilliseconds]:
        """The medians of all samples."""
        return {
            model: ForwardMilliseconds(
                context=self.context,
                seconds={width: statistics.median(taken) for width, taken in sorted(times.items())},
            )
            for model, times in self.samples.items()
        }

    def _runner(self, model: str) -> ModelRunner:
        if model not in self._runners:
            pair = self.pair
            runner = pair.open_runner(None, 1) if model == TARGET else pair.open_alone(model, 1)
            fill(runner, self.context)
            self._runners[model] = runner
        return self._runners[model]


def widths_of(rows: Iterable[BenchRow], pair: Pair) -> dict[str, set[int]]:
    """The widths of forwards that our rows ran and the oracle needs, by model. Of a draft model
    only the mean width of a take is known: the two widths around it."""
    widths: dict[str, set[int]] = {TARGET: {1, 2}, **{name: {1, 2} for name in pair.drafts}}
    for row in rows:
        draft = row.configuration.draft_of(pair.drafts) if row.configuration is not None else None
        for effort in row.efforts:
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
    efforts, tokens = row.efforts, row.tokens
    if not efforts or TARGET not in forwards:
        return None
    alone = sum(
        count * forwards[TARGET].at(width)
        for effort in efforts
        for width, count in effort.widths.items()
    )
    if any(effort.draft_forwards for effort in efforts):
        if draft is None or draft not in forwards:
            return None
        alone += sum(e.draft_forwards * forwards[draft].at(_draft_width(e)) for e in efforts)
    parts = {part: sum(e.seconds[part] for e in efforts) / tokens for part in efforts[0].seconds}
    outside = row.seconds / tokens - sum(parts.values())
    return Split({**parts, "outside": outside}, parts["prefill"] + alone / tokens)


def oracle_limits(
    pair: Pair,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    forwards: Mapping[str, ForwardMilliseconds],
) -> list[OracleLimit]:
    """The oracle of each draft over `texts`, each a prompt and the target's greedy tokens; the
    prefill yields the first token."""
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


def limits(result: BenchResult, row: BenchRow) -> tuple[Split | None, float | None]:
    """A row's time by part, and a greedy row's speed as a share of the oracle's with the same draft
    and the row's prefill; None where unknown."""
    if row.configuration is None:
        return None, None
    draft = row.configuration.draft_of(result.pair.drafts)
    oracle = next((limit for limit in result.oracles if limit.draft == draft), None)
    share = None
    if oracle is not None and not row.temperature and row.efforts:
        prefill = sum(effort.seconds["prefill"] for effort in row.efforts)
        share = (oracle.seconds_per_token * row.tokens + prefill) / row.seconds
    return split(row, result.forwards, draft), share


def limits_frame(result: BenchResult, temperature: float) -> pd.DataFrame:
    """One row for each of our rows with rounds, the fastest first: milliseconds of a token by part,
    and the speed as a share of that of its forwards alone and of the oracle's."""
    rows = []
    for row in result.at(temperature, OURS):
        times, oracle = limits(result, row)
        if times is not None:
            rows.append(
                {
                    "contestant": row.name,
                    "temperature": temperature,
                    "ms_per_token": 1e3 * times.whole,
                    "of_forwards": times.of_forwards,
                    "of_oracle": oracle,
                    "beside_forwards": times.beyond_forwards_share,
                    **{f"{name}_ms": 1e3 * times.parts[name] for name in PARTS},
                }
            )
    frame = pd.DataFrame(rows)
    return frame.sort_values("ms_per_token").reset_index(drop=True) if rows else frame


def _draft_width(effort: Effort) -> float:
    """Mean width of the draft model's forwards: one in a chain, more in a tree."""
    return max(effort.draft_tokens / effort.draft_forwards, 1.0) if effort.draft_forwards else 1.0
