"""Configurations compared at one load, by interleaved live runs.

A configuration's value is what its requests gained over what they cost: tokens, or requests within
the objective, over seconds. n clients that always wait receive n times what one of them receives
(Little's law), so that the end of a run, when some clients have no request left, does not count.
Requests and turns are resampled together for all configurations, which answer the same requests. A
configuration may have had fewer turns than another; they are compared over the turns that both had,
because the machine's speed differs from turn to turn.

Requests at the same time are not independent, so that with many clients intervals are too narrow
rather than too wide. A race that looks several times, to stop when the choice is clear, has the
intervals of all looks hold together (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pandas as pd

from specdec_core.base.files import atomic_path
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.measure.comparison import interleaved
from specdec_core.measure.paired import unbeaten
from specdec_core.search.load.measures import measured
from specdec_core.search.load.workload import LiveSettings, Load, Objective, Slo
from specdec_core.tokens.statistics import Ratio

DRAWS = 2000
CONFIDENCE = 0.95
_SURE = 2  # turns before a configuration leaves: a single run may have been disturbed


class Cost(NamedTuple):
    """The cost of a choice, as a share of what the best reaches: expected, and its interval."""

    expected: float
    low: float
    high: float


class LoadComparison:
    """Configurations at one load. `runs[id]` has the records of each turn, from the first on.
    `looks` is the number of comparisons that have intervals which hold together."""

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
        """The configurations that had every turn."""
        most = max(map(len, self.runs.values()))
        return [config_id for config_id, of in self.runs.items() if len(of) == most]

    def ratio(self, candidate: str, baseline: str) -> Ratio:
        """How many times as good `candidate` is. Infinite over a baseline that reaches nothing."""
        if candidate == baseline:
            return Ratio(1.0, 1.0, 1.0)
        (value, draws), (base_value, base_draws) = self._together([candidate, baseline])
        return Ratio(float(_over(value, base_value)), *self._interval(_over(draws, base_draws)))

    def in_question(self, among: Collection[str]) -> list[str]:
        """The configurations that no other of them is shown to be better than."""
        return unbeaten(among, self.ratio)

    def cost(self, choice: str, among: Collection[str]) -> Cost:
        """What choosing one of `among` costs against the best of them."""
        (_, chosen), *rest = self._together([choice, *among])
        best = np.max([draws for _, draws in rest], axis=0)
        costs = np.where(best > 0, 1 - chosen / np.where(best > 0, best, 1), 0.0)
        return Cost(float(costs.mean()), *self._interval(costs))

    def decision(
        self, kept: str | None = None, tolerance: float = 0, most: float = 1
    ) -> tuple[str, Cost]:
        """The choice among the configurations that had every turn, and its cost: a configuration
        that left before was shown to be worse. The one in question with the least expected cost is
        the choice, unless `kept` is in question, is expected to cost at most `tolerance` more, and
        is shown to cost at most `most`."""
        among = self.racing
        costs = {each: self.cost(each, among) for each in self.in_question(among)}
        best = min(costs, key=lambda each: costs[each].expected)
        if kept is not None and kept in costs:
            within = costs[kept].expected <= costs[best].expected + tolerance
            best = kept if within and costs[kept].high <= most else best
        return best, costs[best]

    def _interval(self, draws: np.ndarray) -> tuple[float, float]:
        tails = [self._tail, 1 - self._tail]
        low, high = np.quantile(draws, tails, method="nearest")
        return float(low), float(high)

    def _together(self, ids: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The value of each, and its draws, over the turns that all of them had."""
        turns = min(len(self.runs[config_id]) for config_id in ids)
        return [self._resampled(config_id, turns) for config_id in ids]

    def _resample(self, config_id: str, turns: int) -> tuple[np.ndarray, np.ndarray]:
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
    # In an open loop the time in which requests arrive is given, so goodput counts them alone.
    fixed = by == "goodput" and not load.closed
    cost = np.ones(len(table)) if fixed else table["latency"]
    return gain.to_numpy(float), np.asarray(cost, float)


def _value(gains: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Of (…, turns, requests): gains are means over the turns, costs medians."""
    return np.asarray(gains.mean(axis=-2).sum(axis=-1) / np.median(costs, axis=-2).sum(axis=-1))


def _over(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """A ratio; that of nothing to nothing is 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((ours == 0) & (theirs == 0), 1.0, ours / theirs)


class LoadTimer(Protocol):
    """Answers the requests of a load on the live engine, alone on its devices."""

    def warm_up(self, configuration: Configuration, load: Load) -> None:
        """Answer some requests, untimed: steps of a new shape compile their kernels."""

    def answer(self, configuration: Configuration, load: Load) -> pd.DataFrame:
        """Records of the requests, as in :mod:`specdec_core.search.load.measures`. Drafters begin
        with nothing learned."""


@dataclass
class LiveRace:
    """Races of configurations, one load after another. Each run is a file in `folder` as soon as it
    is taken; a run that is there is not taken again."""

    live: LiveSettings
    timer: LoadTimer
    folder: Path
    observer: Observer
    by: Objective
    slo: Slo | None = None
    _warm: set[tuple[Load, str]] = field(default_factory=set)

    def run(
        self, load: Load, contestants: Sequence[Configuration], first: int = 0
    ) -> LoadComparison:
        """Run turns, numbered from `first`, until one configuration is left, the choice is shown to
        cost at most `live.cost`, or the repeats are used. A configuration that is shown to be
        slower than another leaves the race."""
        racing = list(contestants)
        taken: dict[str, list[pd.DataFrame]] = {each.id: [] for each in contestants}
        looks = looks_within(self.live.repeats)
        for turn in range(self.live.repeats):
            for each in interleaved(racing, first + turn):
                taken[each.id].append(self._records(load, first + turn, each))
            if turn + 1 not in looks:
                continue
            comparison = LoadComparison(taken, load, self.by, self.slo, len(looks))
            in_question = comparison.in_question(comparison.racing)
            racing = [each for each in racing if each.id in in_question]
            if len(racing) == 1 or comparison.decision()[1].high <= self.live.cost:
                break
        return comparison

    def _records(self, load: Load, turn: int, configuration: Configuration) -> pd.DataFrame:
        """The records of a run."""
        name = f"{load.clients or 'open'}-{turn}-{configuration.id}.parquet"
        path = self.folder / name
        if not path.exists():
            if (load, configuration.id) not in self._warm:
                self.timer.warm_up(configuration, load)
                self._warm.add((load, configuration.id))
            records = self.timer.answer(configuration, load)
            with atomic_path(path) as temporary:
                records.to_parquet(temporary, index=False)
        self.observer.step()
        return pd.read_parquet(path)


def looks_within(repeats: int) -> list[int]:
    """The turns after which a race of at most `repeats` is looked at, each half as many again as
    the one before: every look widens the intervals of all."""
    after, looks = _SURE, list[int]()
    while after < repeats:
        looks.append(after)
        after += after // 2
    return [*looks, repeats]
