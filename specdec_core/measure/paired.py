"""Contestants compared on the same requests, which are resampled together.

A contestant's value is what its requests gained over what they cost. Of several turns the gains are
means and the costs medians. Requests and turns are resampled together for all contestants, which
had the same requests. A contestant may have had fewer turns than another; they are compared over
the turns that both had, because the machine's speed differs from turn to turn, and on the requests
that both answered in each of them.

Requests at the same time are not independent, so that with many clients intervals are too narrow
rather than too wide. A race that looks several times, to stop when the choice is clear, has the
intervals of all looks hold together (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np

from specdec_core.tokens.statistics import Ratio

DRAWS = 2000
CONFIDENCE = 0.95
UNKNOWN = Ratio(*[float("nan")] * 3)

Name = TypeVar("Name", bound=Hashable)


def unbeaten(among: Collection[Name], ratio: Callable[[Name, Name], Ratio]) -> list[Name]:
    """The contestants that no other one of `among` is shown to be better than, by the `ratio` of a
    candidate to a baseline."""
    return [
        each
        for each in among
        if all(ratio(other, each).low <= 1 for other in among if other != each)
    ]


class Cost(NamedTuple):
    """The cost of a choice, as a share of what the best reaches: expected, and its interval."""

    expected: float
    low: float
    high: float


class Paired:
    """Contestants by name. `costs` and `gains` of each have the shape (turns, requests); a cost is
    NaN where the request failed; unset, every request gains the same. `looks` is the number of
    comparisons that have intervals which hold together."""

    def __init__(
        self,
        costs: Mapping[str, np.ndarray],
        gains: Mapping[str, np.ndarray] | None = None,
        looks: int = 1,
    ) -> None:
        self._costs = costs
        self._gains = gains or {name: np.ones_like(cost) for name, cost in costs.items()}
        self._tail = (1 - CONFIDENCE) / 2 / looks
        if len({cost.shape[1] for cost in costs.values()}) > 1:
            raise ValueError(f"unpaired requests: {[cost.shape for cost in costs.values()]}")
        self.turns, requests = max(cost.shape for cost in costs.values())  # the most
        rng = np.random.default_rng(0)
        self._places = rng.random((DRAWS, self.turns, 1))
        self._drawn = rng.random((DRAWS, 1, requests))
        self._resampled = cache(self._resample)

    @property
    def racing(self) -> list[str]:
        """The contestants that had every turn."""
        return [name for name, cost in self._costs.items() if len(cost) == self.turns]

    def ratio(self, candidate: str, baseline: str) -> Ratio:
        """How many times as good `candidate` is. Infinite over a baseline that reaches nothing;
        unknown where they have answered no request in common."""
        if candidate == baseline:
            return Ratio(1.0, 1.0, 1.0)
        (value, draws), (base_value, base_draws) = self._together([candidate, baseline])
        if not draws.size:
            return UNKNOWN
        return Ratio(float(_over(value, base_value)), *self._interval(_over(draws, base_draws)))

    def in_question(self, among: Collection[str]) -> list[str]:
        """The contestants that no other of them is shown to be better than."""
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
        """The choice among the contestants that had every turn, and its cost: a contestant that
        left before was shown to be worse. The one in question with the least expected cost is the
        choice, unless `kept` is in question, is expected to cost at most `tolerance` more, and is
        shown to cost at most `most`."""
        among = self.racing
        costs = {each: self.cost(each, among) for each in self.in_question(among)}
        best = min(costs, key=lambda each: costs[each].expected)
        if kept is not None and kept in costs:
            within = costs[kept].expected <= costs[best].expected + tolerance
            best = kept if within and costs[kept].high <= most else best
        return best, costs[best]

    def _interval(self, draws: np.ndarray) -> tuple[float, float]:
        # Draws may be infinite, between which nothing can be interpolated.
        low, high = np.quantile(draws, [self._tail, 1 - self._tail], method="nearest")
        return float(low), float(high)

    def _together(self, names: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The value of each, and its draws, over the turns that all of them had and the requests
        that all answered in them; no draws where there is no such request."""
        turns = min(len(self._costs[name]) for name in names)
        failed = np.isnan([self._costs[name][:turns] for name in names]).any(axis=(0, 1))
        answered = tuple(np.flatnonzero(~failed).tolist())
        return [self._resampled(name, turns, answered) for name in names]

    def _resample(
        self, name: str, turns: int, answered: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        if not answered:
            return np.array(np.nan), np.array([])
        gains, costs = (of[name][:turns, list(answered)] for of in (self._gains, self._costs))
        t = (self._places[:, :turns] * turns).astype(int)
        r = (self._drawn[..., : len(answered)] * len(answered)).astype(int)
        return _value(gains, costs), _value(gains[t, r], costs[t, r])


def paired_ratio(baseline: np.ndarray, candidate: np.ndarray) -> Ratio:
    """How many times as fast `candidate` is as `baseline`. Both are seconds of the same requests,
    shape (turns, requests), taken interleaved; NaN where a request failed."""
    seconds = {"candidate": np.atleast_2d(candidate), "baseline": np.atleast_2d(baseline)}
    return Paired(seconds).ratio(*seconds)


def _value(gains: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Of (…, turns, requests)."""
    return np.asarray(gains.mean(axis=-2).sum(axis=-1) / np.median(costs, axis=-2).sum(axis=-1))


def _over(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """A ratio; that of nothing to nothing is 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((ours == 0) & (theirs == 0), 1.0, ours / theirs)
