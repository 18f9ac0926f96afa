"""Stop where the draft model is not confident."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from specdec_core.config import MOST_TOKENS, MaxTokens, PolicySettings
from specdec_core.drafting.policies.policy import Rule

if TYPE_CHECKING:
    from specdec_core.drafting.policies.signals import Signals


class ConfidenceSettings(PolicySettings):
    """Stop after a token where the draft distribution peaks below `threshold`."""

    kind: Literal["confidence"] = "confidence"
    threshold: float = Field(default=0.4, ge=0, le=1)
    max_tokens: MaxTokens = MOST_TOKENS

    replayed: ClassVar = True

    @property
    def label(self) -> str:
        return f"confidence {self.threshold:g}{self.up_to}"


class ConfidencePolicy(Rule):
    """Stop after a token where the distribution peaks below the threshold."""

    reads = ("top_probability",)

    def values(self, signals: Signals) -> Sequence[float]:
        return signals.top_probability

    def stops(self, value: Any) -> Any:
        return value < self.settings.threshold
