"""Stop where the draft as a whole is not likely any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from specdec_core.config import MOST_TOKENS, MaxTokens, PolicySettings
from specdec_core.drafting.policies.policy import Rule

if TYPE_CHECKING:
    from specdec_core.drafting.policies.signals import Signals


class ConfidenceProductSettings(PolicySettings):
    """Stop when the product of the round's draft probabilities q(y) falls below `threshold`."""

    kind: Literal["confidence_product"] = "confidence_product"
    threshold: float = Field(default=0.4, ge=0, le=1)
    max_tokens: MaxTokens = MOST_TOKENS

    replayed: ClassVar = True

    @property
    def label(self) -> str:
        return f"product {self.threshold:g}{self.up_to}"


class ConfidenceProductPolicy(Rule):
    """Stop when Π q(y) of the round falls below the threshold."""

    cumulative = True
    reads = ("probability",)

    def values(self, signals: Signals) -> Sequence[float]:
        return signals.probability

    def stops(self, value: Any) -> Any:
        return value < self.settings.threshold
