"""K candidates every round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from specdec_core.config import MaxTokens, PolicySettings
from specdec_core.drafting.policies.policy import Rule

if TYPE_CHECKING:
    from specdec_core.drafting.policies.signals import Signals


class FixedSettings(PolicySettings):
    """K candidate tokens every round (Leviathan et al., 2023)."""

    kind: Literal["fixed"] = "fixed"
    max_tokens: MaxTokens = 5

    replayed: ClassVar = True

    @property
    def label(self) -> str:
        return f"K={self.max_tokens}"


class FixedPolicy(Rule):
    """K candidates, whatever they are."""

    def values(self, signals: Signals) -> Sequence[float]:
        return [1.0] * len(signals.slots)

    def stops(self, value: Any) -> Any:
        return value < 0

    def go_on(self, signals: Signals) -> Sequence[bool]:
        return [True] * len(signals.slots)
