"""Rules without training: compare something the draft model says anyway with a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec_core.drafting.policies.policy import Rule, Signals


class Fixed(Rule):
    """K candidates, whatever they are."""

    def values(self, signals: Signals) -> Sequence[float]:
        return [1.0] * len(signals.slots)

    def stops(self, value: Any) -> Any:
        return value < 0

    def go_on(self, signals: Signals) -> Sequence[bool]:
        return [True] * len(signals.slots)


class Confidence(Rule):
    """Stop behind a token whose distribution peaks below the threshold."""

    reads = ("top_probability",)

    def values(self, signals: Signals) -> Sequence[float]:
        return signals.top_probability

    def stops(self, value: Any) -> Any:
        return value < self.settings.threshold


class ConfidenceProduct(Rule):
    """Stop when Π q(y) of the round falls below the threshold."""

    cumulative = True
    reads = ("probability",)

    def values(self, signals: Signals) -> Sequence[float]:
        return signals.probability

    def stops(self, value: Any) -> Any:
        return value < self.settings.threshold


class Svip(Rule):
    """Stop behind a token whose distribution has √H > h (SVIP, Eq. 7)."""

    reads = ("entropy",)

    def values(self, signals: Signals) -> Sequence[float]:
        return signals.entropy

    def stops(self, value: Any) -> Any:
        return value > self.settings.threshold**2
