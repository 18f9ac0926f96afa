"""Stop where a trained head expects a rejection: of any candidate of the round (SpecDec++), or of
the latest one (improved MCSD, §3.3)."""

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
    rejected (SpecDec++, §4.3).

    The head's value of the first candidate is known once the second is drawn, so a round that may
    have two candidates has at least two: `min_tokens: 1` is read as 2. `max_tokens: 1` is K = 1."""

    head_kinds: ClassVar = ("specdecpp",)

    kind: Literal["specdecpp"] = "specdecpp"
    head: str = Field(description="name or folder of a trained acceptance head")
    threshold: float = Field(default=0.7, ge=0, le=1)
    min_tokens: MaxTokens = Field(default=2, description="fewest candidate tokens in a round")
    max_tokens: MaxTokens = MOST_TOKENS

    def model_post_init(self, _: Any) -> None:
        fewest = min(2, self.max_tokens)
        if self.min_tokens < fewest or "min_tokens" not in self.model_fields_set:
            object.__setattr__(self, "min_tokens", fewest)  # the model is frozen
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
        return self.head.probabilities(signals.hidden).tolist()

    def stops(self, value: Any) -> Any:
        return 1 - value > self.settings.threshold


class DecisionSettings(HeadSettings):
    """Stop after a candidate that a decision model accepts with a probability below `threshold`
    (improved MCSD, §3.3); `cumulative`, where the product of the round's probabilities is below
    it."""

    head_kinds: ClassVar = ("t1", "t2", "joint")

    kind: Literal["decision"] = "decision"
    head: str = Field(description="name or folder of a trained decision model")
    threshold: float = Field(default=0.4, ge=0, le=1)
    cumulative: bool = False
    max_tokens: MaxTokens = MOST_TOKENS

    @property
    def label(self) -> str:
        product = " product" if self.cumulative else ""
        return f"decision{product} {self.threshold:g}{self.up_to}"


class DecisionPolicy(HeadRule):
    """Stop after a candidate that the decision model gives a probability below the threshold
    (improved MCSD, §3.3; a chain is one sequence, so all sequences are below when it is)."""

    def __init__(self, settings: DecisionSettings, head: LoadedHead) -> None:
        super().__init__(settings, head)
        self.cumulative = settings.cumulative
        self.needs_hidden = head.card.kind != "t2"

    def values(self, signals: Signals) -> Sequence[float]:
        card, hidden = self.head.card, signals.hidden if self.needs_hidden else None
        if card.kind == "t1":
            return self.head.probabilities(hidden).tolist()
        top, entropy = signals.top_probabilities(card.top_k), signals.measure("entropy")
        return self.head.probabilities(hidden, top, entropy).tolist()
