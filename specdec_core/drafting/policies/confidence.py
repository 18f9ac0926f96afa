"""Stop where the draft model is not confident: of a token, or of the draft as a whole."""

from __future__ import annotations

from typing import ClassVar, Literal

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
