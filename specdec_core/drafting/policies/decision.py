"""Stop where a decision model expects a rejection (improved MCSD, §3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from specdec_core.config import MOST_TOKENS, HeadSettings, MaxTokens
from specdec_core.drafting.policies.policy import HeadRule

if TYPE_CHECKING:
    from specdec_core.drafting.heads.loaded import LoadedHead
    from specdec_core.drafting.policies.signals import Signals


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
        self._needs_distribution = head.card.kind != "t1"

    def values(self, signals: Signals) -> Sequence[float]:
        features: dict[str, Any] = {}
        if self.needs_hidden:
            features["hidden"] = signals.hidden
        if self._needs_distribution:
            top = signals.top_probabilities(self.head.card.top_k)
            features["top_probs"] = top
            features["entropy"] = signals.measure("entropy")
        return self.head.probabilities(**features).tolist()
