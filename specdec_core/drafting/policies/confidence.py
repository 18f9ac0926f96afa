"""Stop where the draft model is not confident: of a token, by its probability or the entropy, or of
the draft as a whole."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from specdec_core.config import MOST_TOKENS, MaxTokens, PolicySettings
from specdec_core.drafting.policies.policy import Rule


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


class SvipSettings(PolicySettings):
    """Stop after a token where the draft distribution has √H > `threshold` (SVIP, Eq. 7; H in
    nats)."""

    kind: Literal["svip"] = "svip"
    threshold: float = Field(default=0.8, ge=0)
    max_tokens: MaxTokens = MOST_TOKENS

    replayed: ClassVar = True

    @property
    def label(self) -> str:
        return f"entropy {self.threshold:g}{self.up_to}"


class SvipPolicy(Rule):
    """Stop after a token where the distribution has √H > h (SVIP, Eq. 7)."""

    reads = ("entropy",)

    def stops(self, value: Any) -> Any:
        return value > self.settings.threshold**2


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
