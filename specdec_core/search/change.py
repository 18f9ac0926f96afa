"""Whether values that come one after the other have changed their distribution.

As long as they are exchangeable, the rank of each among those before it, ties broken at random, is
uniform on [0, 1] and independent of the ranks before, whatever their distribution is (a conformal
p-value; Vovk, Gammerman and Shafer, *Algorithmic Learning in a Random World*, 2nd ed., ch. 8).
Capital that bets on ranks p by the factors 1 + ε(p − ½) therefore has no expected gain. New capital
of 1 comes with every value, and some of it moves between the bets at each (the simple jumper; Vovk
et al., *Retrain or not retrain*, COPA 2021):

    R_ε ← ((1 − J)·R_ε + (J·ΣR + 1) / |E|) · (1 + ε(p − ½)),   ε ∈ E

So E[ΣR after n values] = n (a Shiryaev–Roberts e-detector; Shin, Ramdas and Rinaldo, *E-detectors*,
2023), and with an alarm at ΣR ≥ c, the chance of a false alarm within n values is at most n / c,
for every n: by optional stopping c·P(τ ≤ n) ≤ E[R_τ∧n] = E[τ∧n] ≤ n.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random

BETS = (-2.0, -1.0, 1.0, 2.0)  # ε: smaller or greater values than before, much or somewhat
JUMP = 0.01  # J, the share of the capital that moves at each value
STEPS = 1000  # values are told apart up to this part of their range
RECENT = 50  # values that say what they have become


@dataclass(frozen=True)
class Change:
    """An alarm at the `count`-th value: their mean before the last :data:`RECENT`, and of these."""

    count: int
    before: float
    after: float


class ChangeDetector:
    """Looks for a change of values between `low` and `high`. A false alarm comes within n values
    with probability n / `between` at the most. After an alarm it begins anew."""

    def __init__(self, low: float, high: float, between: float, seed: int = 0) -> None:
        self.low, self.high, self.between = low, high, between
        self._random = Random(seed)
        self.begin()

    def begin(self) -> None:
        """Forget all values."""
        self.count, self._sum = 0, 0.0
        self._counts = [0] * (STEPS + 1)
        self._capital = [0.0] * len(BETS)
        self._recent: deque[float] = deque(maxlen=RECENT)

    @property
    def evidence(self) -> float:
        """The capital as a share of what an alarm takes."""
        return sum(self._capital) / self.between

    def add(self, value: float) -> Change | None:
        """Take the next value; returns the change where that raises the alarm."""
        rank = self._rank(value)
        shared = (JUMP * sum(self._capital) + 1) / len(BETS)
        self._capital = [
            ((1 - JUMP) * capital + shared) * (1 + bet * (rank - 0.5))
            for bet, capital in zip(BETS, self._capital, strict=True)
        ]
        if self.evidence < 1:
            return None
        recent = sum(self._recent)
        earlier = self.count - len(self._recent)
        after = recent / len(self._recent)
        before = (self._sum - recent) / earlier if earlier else after
        change = Change(self.count, before, after)
        self.begin()
        return change

    def _rank(self, value: float) -> float:
        """The value's rank among all so far, itself included, in [0, 1]."""
        share = (value - self.low) / (self.high - self.low)
        step = round(min(max(share, 0.0), 1.0) * STEPS)
        self._counts[step] += 1
        self.count += 1
        self._sum += value
        self._recent.append(value)
        below = sum(self._counts[:step])
        return (below + self._random.random() * self._counts[step]) / self.count
