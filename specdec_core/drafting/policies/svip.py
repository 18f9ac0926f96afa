"""Stop where the draft model's entropy is high (SVIP)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from specdec_core.config import MOST_TOKENS, MaxTokens, PolicySettings
from specdec_core.drafting.policies.policy import Rule


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
