"""Stop where a trained head expects that a candidate of the round is rejected (SpecDec++)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from specdec_core.config import MOST_TOKENS, HeadSettings, MaxTokens
from specdec_core.drafting.policies.policy import HeadRule

if TYPE_CHECKING:
    from specdec_core.drafting.heads.loaded import LoadedHead
    from specdec_core.drafting.policies.signals import Signals


class SpecDecPlusPlusSettings(HeadSettings):
    """Stop when 1 − Π p̂ > `threshold`, the head's probability that a candidate of the round is
    rejected (SpecDec++, §4.3)."""

    head_kinds: ClassVar = ("specdecpp",)

    kind: Literal["specdecpp"] = "specdecpp"
    head: str = Field(description="name or folder of a trained acceptance head")
    threshold: float = Field(default=0.7, ge=0, le=1)
    min_tokens: MaxTokens = 2
    max_tokens: MaxTokens = MOST_TOKENS

    def model_post_init(self, _: Any) -> None:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")

    @property
    def label(self) -> str:
        return f"SpecDec++ {self.threshold:g}{self.up_to}"


class SpecDecPlusPlusPolicy(HeadRule):
    """Stop when 1 − Π p̂ > h (SpecDec++, Alg. 1).

    The head reads the state of a candidate, which exists once the draft model has read it, while it
    draws the next one. So the product reaches to the candidate before.
    """

    needs_hidden = True
    cumulative = True
    lagging = True

    def __init__(self, settings: SpecDecPlusPlusSettings, head: LoadedHead) -> None:
        super().__init__(settings, head)
        self.min_tokens = settings.min_tokens

    def values(self, signals: Signals) -> Sequence[float]:
        return self.head.probabilities(hidden=signals.hidden).tolist()

    def stops(self, value: Any) -> Any:
        return 1 - value > self.settings.threshold
