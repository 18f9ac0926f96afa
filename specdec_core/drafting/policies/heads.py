"""Rules that ask a trained head how likely a candidate is to be accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specdec_core.base.errors import UserError
from specdec_core.config import DecisionPolicy, SpecDecPlusPlusPolicy
from specdec_core.drafting.heads.loaded import LoadedHead
from specdec_core.drafting.policies.policy import Rule, Signals


class SpecDecPlusPlus(Rule):
    """Stop when 1 − Π p̂ > h (SpecDec++, Alg. 1).

    The head reads the state of a candidate, which exists once the candidate has been fed to the
    draft model, that is while the next one is drawn: the product reaches to the one before.
    """

    needs_hidden = True
    cumulative = True
    lagging = True

    def __init__(self, settings: SpecDecPlusPlusPolicy, head: LoadedHead) -> None:
        super().__init__(settings)
        _expect(head, settings.head, settings.kind, ("specdecpp",))
        self.head, self.min_tokens = head, settings.min_tokens

    def values(self, signals: Signals) -> Sequence[float]:
        return self.head.probabilities(hidden=signals.hidden).tolist()

    def stops(self, value: Any) -> Any:
        return 1 - value > self.settings.threshold


class Decision(Rule):
    """Stop behind a candidate that the decision model gives less than the threshold (improved
    MCSD, §3.3; a chain is one sequence, so all sequences are below when it is)."""

    def __init__(self, settings: DecisionPolicy, head: LoadedHead) -> None:
        super().__init__(settings)
        _expect(head, settings.head, settings.kind, ("t1", "t2", "joint"))
        self.head, self.cumulative = head, settings.cumulative
        self.needs_hidden = head.card.kind != "t2"
        self._needs_distribution = head.card.kind != "t1"

    def values(self, signals: Signals) -> Sequence[float]:
        features: dict[str, Tensor] = {}
        if self.needs_hidden:
            features["hidden"] = signals.hidden
        if self._needs_distribution:
            top = signals.top_probabilities(self.head.card.top_k)
            features["top_probs"] = top
            features["entropy"] = signals.measure("entropy")
        return self.head.probabilities(**features).tolist()

    def stops(self, value: Any) -> Any:
        return value < self.settings.threshold


def _expect(head: LoadedHead, name: str, policy: str, kinds: tuple[str, ...]) -> None:
    if head.card.kind not in kinds:
        raise UserError(
            f"policy.head: {name} is of kind {head.card.kind}; "
            f"policy {policy} needs {' or '.join(kinds)}"
        )
