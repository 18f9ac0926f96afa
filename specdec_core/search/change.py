"""Whether values that come one after the other have changed their distribution.

As long as they are exchangeable, the rank of each among those before it, ties broken at random, is
uniform on [0, 1] and independent of the ranks before, whatever their distribution is (a conformal
p-value; Vovk, Gammerman and Shafer, *Algorithmic Learning in a Random World*, 2nd ed., ch. 8).
Capital that bets on ranks p by factors f(p) with mean 1 therefore has no expected gain. New capital
s comes with every value, and some of it moves between the bets at each (the simple jumper; Vovk et
al., *Retrain or not retrain*, COPA 2021):

    R_f ← ((1 − J)·R_f + J·ΣR / |F|) · f(p) + s / |F|,   f ∈ F

So E[ΣR] is the sum of s (a Shiryaev–Roberts e-detector; Shin, Ramdas and Rinaldo, *E-detectors*,
2023). An alarm at ΣR ≥ 1 uses that capital up, so no more false alarms are expected than the sum of
s, by optional stopping: with the seconds that pass for s, at most one in the time that makes 1.

What is shown beyond chance may be too small to matter. Then there is no alarm, and ranks begin
anew; the level that later values are compared with stays, so that small changes add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from random import Random

import numpy as np

# f: for smaller and for greater values than before, somewhat and far.
BETS: tuple[Callable[[float], float], ...] = (
    lambda p: 1.5 - p,
    lambda p: 0.5 + p,
    lambda p: 0.5 / sqrt(max(p, 1e-12)),
    lambda p: 0.5 / sqrt(max(1 - p, 1e-12)),
)
JUMP = 0.01  # J, the share of the capital that moves at each value
STEPS = 1000  # values are told apart up to this part of their range
LATEST = 1000  # values among which the change is looked for
FEWEST = 3  # values before it, and after it
SETTLING = 6  # values more that may show that it matters


@dataclass(frozen=True)
class Change:
    """An alarm: the values' mean before the change, and since."""

    before: float
    after: float


class ChangeDetector:
    """Looks for a change of values between `low` and `high` that moves their mean by `least` or
    more. After an alarm it begins anew."""

    def __init__(self, low: float, high: float, least: float, seed: int = 0) -> None:
        self.low, self.high, self.least = low, high, least
        self._random = Random(seed)
        self.begin()

    def begin(self) -> None:
        """Forget all values."""
        self._earlier, self._earlier_sum = 0, 0.0  # values before the latest ones, and their sum
        self._latest: list[float] = []  # since ranks began
        self._begin_ranks()

    def _begin_ranks(self) -> None:
        self._earlier += len(self._latest)
        self._earlier_sum += sum(self._latest)
        self._latest = []
        self._ranked, self._counts = 0, [0] * (STEPS + 1)
        self._capital = [0.0] * len(BETS)
        self._shown = 0  # values since the evidence was enough

    @property
    def evidence(self) -> float:
        """The capital as a share of what an alarm takes."""
        return sum(self._capital)

    def add(self, value: float, share: float) -> Change | None:
        """Take the next value; returns the change where that raises the alarm. With each value the
        number of false alarms to be expected rises by `share`, which the value must not affect."""
        self._latest.append(value)
        if len(self._latest) > LATEST:
            self._earlier += 1
            self._earlier_sum += self._latest.pop(0)
        rank = self._rank(value)
        moved, fresh = JUMP * self.evidence / len(BETS), share / len(BETS)
        self._capital = [
            ((1 - JUMP) * capital + moved) * bet(rank) + fresh
            for bet, capital in zip(BETS, self._capital, strict=True)
        ]
        self._shown += bool(self._shown or self.evidence >= 1)
        if not self._shown or len(self._latest) < 2 * FEWEST:
            return None
        change = self._change()
        if abs(change.after - change.before) >= self.least:
            self.begin()
            return change
        if self._shown > SETTLING:
            self._begin_ranks()
        return None

    def _change(self) -> Change:
        """The change, where a step of the latest values' mean leaves the least sum of squares."""
        latest = np.array(self._latest)
        after = np.arange(FEWEST, len(latest) - FEWEST + 1)
        sums = latest[::-1].cumsum()[after - 1]
        step = (latest.sum() - sums) / (len(latest) - after) - sums / after
        best = np.argmax(step**2 * (len(latest) - after) * after)
        since, total = int(after[best]), float(sums[best])
        before = self._earlier_sum + float(latest.sum()) - total
        return Change(before / (self._earlier + len(latest) - since), total / since)

    def _rank(self, value: float) -> float:
        """The value's rank among all since ranks began, itself included, in [0, 1]."""
        share = (value - self.low) / (self.high - self.low)
        step = round(min(max(share, 0.0), 1.0) * STEPS)
        self._counts[step] += 1
        self._ranked += 1
        below = sum(self._counts[:step])
        return (below + self._random.random() * self._counts[step]) / self._ranked
