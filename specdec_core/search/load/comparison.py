"""Who is best at a load, by live runs in turns, and what a choice may cost.

A configuration's value is what its requests gained over what they cost: tokens, or requests within
the objective, over seconds. n clients that always wait are written n times what one of them is
(Little's law), so that the end of a run, when some have nothing left to ask, does not count.
Requests and turns are resampled together for all configurations, which answer the same requests.
Some may have had fewer turns: what is compared are the turns that all of those compared had, as a
machine is faster in one than in another.
Requests at the same time are not independent, so that with many clients intervals are too narrow
rather than too wide. Who looks several times, to stop when a choice is clear, has the intervals of
all looks hold together (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd

from specdec_core.search.load.measures import measured
from specdec_core.search.load.workload import Load, Objective, Slo
from specdec_core.tokens.statistics import Ratio

DRAWS = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Cost:
    """What a choice costs, as a share of what the best reaches: expected, and with its interval."""

    expected: float
    low: float
    high: float


class LoadComparison:
    """Configurations at one load, by what their requests gained and cost: `runs[id]` has the
    records of each turn, from the first on that all had. This is one of so many `looks`."""

    def __init__(
        self,
        runs: Mapping[str, Sequence[pd.DataFrame]],
        load: Load,
        by: Objective,
        slo: Slo | None = None,
        looks: int = 1,
    ) -> None:
        self._tail = (1 - CONFIDENCE) / 2 / looks
        self.ids, self.runs = list(runs), dict(runs)
        self._measured = {
            config_id: np.array([_gain_and_cost(records, load, by, slo) for records in of])
            for config_id, of in runs.items()
        }  # of each configuration (turns, 2, requests)
        most, requests = max(map(len, runs.values())), len(self._measured[self.ids[0]][0, 0])
        rng = np.random.default_rng(0)
        self._places = rng.random((DRAWS, most, 1))
        self._drawn = rng.integers(requests, size=(DRAWS, 1, requests))
        self._resampled = cache(self._resample)

    @property
    def racing(self) -> list[str]:
        """Those that had every turn."""
        most = max(map(len, self.runs.values()))
        return [config_id for config_id, of in self.runs.items() if len(of) == most]

    def ratio(self, candidate: str, baseline: str) -> Ratio:
        """How many times as good `candidate` is. Infinite over a baseline that reaches nothing."""
        if candidate == baseline:
            return Ratio(1.0, 1.0, 1.0)
        (value, draws), (their_value, their_draws) = self._together([candidate, baseline])
        low, high = self._interval(_over(draws, their_draws))
        return Ratio(float(_over(value, their_value)), low, high)

    def in_question(self, among: Collection[str]) -> list[str]:
        """Those that no other of them is shown to be better than."""
        return [
            worse
            for worse in among
            if all(self.ratio(each, worse).low <= 1 for each in among if each != worse)
        ]

    def cost(self, choice: str, among: Collection[str]) -> Cost:
        """What choosing one of them costs against the best of them."""
        (_, ours), *others = self._together([choice, *among])
        best = np.max([draws for _, draws in others], axis=0)
        costs = np.where(best > 0, 1 - ours / np.where(best > 0, best, 1), 0.0)
        return Cost(float(costs.mean()), *self._interval(costs))

    def choose(self, among: Collection[str]) -> str:
        """The least expected cost of those in question."""
        costs = {each: self.cost(each, among).expected for each in self.in_question(among)}
        return min(costs, key=costs.__getitem__)

    def decision(
        self, kept: str | None = None, tolerance: float = 0, most: float = 1
    ) -> tuple[str, Cost]:
        """The choice among those that had every turn (whoever left before was shown to be worse),
        and what it costs. `kept` is the choice if it is one of those in question, is expected to
        cost no more than `tolerance` beyond the best, and is shown to cost at most `most`."""
        among = self.racing
        best = self.choose(among)
        cost = self.cost(best, among)
        if kept in self.in_question(among):
            keeping = self.cost(kept, among)
            if keeping.expected <= cost.expected + tolerance and keeping.high <= most:
                return kept, keeping
        return best, cost

    def _interval(self, draws: np.ndarray) -> tuple[float, float]:
        tails = [self._tail, 1 - self._tail]
        low, high = np.quantile(draws, tails, method="nearest")
        return float(low), float(high)

    def _together(self, ids: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The value of each, and its draws, over the turns that all of them had."""
        turns = min(len(self.runs[config_id]) for config_id in ids)
        return [self._resampled(config_id, turns) for config_id in ids]

    def _resample(self, config_id: str, turns: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the first so many turns: the value () and its draws (draws,)."""
        of = self._measured[config_id][:turns]
        gains, costs = of[:, 0], of[:, 1]
        t, r = (self._places[:, :turns] * turns).astype(int), self._drawn
        return _value(gains, costs), _value(gains[t, r], costs[t, r])


def _gain_and_cost(
    records: pd.DataFrame, load: Load, by: Objective, slo: Slo | None
) -> tuple[np.ndarray, np.ndarray]:
    """Of each request, in their order."""
    table = measured(records, slo).sort_values("index")
    gain = table["good"] if by == "goodput" else table["tokens"]
    # In an open loop requests within the objective come over a time that nobody changes.
    fixed = by == "goodput" and not load.closed
    cost = np.ones(len(table)) if fixed else table["latency"]
    return gain.to_numpy(float), np.asarray(cost, float)


def _value(gains: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Of (…, turns, requests): gains are means over the turns, costs medians."""
    return np.asarray(gains.mean(axis=-2).sum(axis=-1) / np.median(costs, axis=-2).sum(axis=-1))


def _over(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """A ratio, of nothing to nothing 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((ours == 0) & (theirs == 0), 1.0, ours / theirs)
