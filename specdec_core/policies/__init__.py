"""Length policies: after this candidate, draft another one or verify?"""

from __future__ import annotations

from collections.abc import Callable

from specdec_core import config
from specdec_core.errors import UserError
from specdec_core.heads import LoadedHead
from specdec_core.policies.base import LengthPolicy, PolicyOutcome, Rule, Signals
from specdec_core.policies.by_batch import ByBatch
from specdec_core.policies.dynamic import DynamicConfidence
from specdec_core.policies.heads import Decision, SpecDecPlusPlus
from specdec_core.policies.heuristic import Heuristic
from specdec_core.policies.pre_cut import PreCut
from specdec_core.policies.thresholds import Confidence, ConfidenceProduct, Fixed, Svip

__all__ = [
    "LengthPolicy",
    "LoadHead",
    "PolicyOutcome",
    "Rule",
    "Signals",
    "build_policy",
]

LoadHead = Callable[[str], LoadedHead]

_POLICIES: dict[type[config.Value], type[LengthPolicy]] = {
    config.FixedPolicy: Fixed,
    config.ByBatchPolicy: ByBatch,
    config.HeuristicPolicy: Heuristic,
    config.ConfidencePolicy: Confidence,
    config.SvipPolicy: Svip,
    config.ConfidenceProductPolicy: ConfidenceProduct,
    config.DynamicConfidencePolicy: DynamicConfidence,
    config.PreCutPolicy: PreCut,
}


def build_policy(settings: config.Policy, load_head: LoadHead) -> LengthPolicy:
    """The policy that `settings` describe; `load_head` finds a trained head by its name.

    Raises :class:`UserError` for the oracle, which nothing that decodes can follow.
    """
    match settings:
        case config.SpecDecPlusPlusPolicy():
            return SpecDecPlusPlus(settings, load_head(settings.head))
        case config.DecisionPolicy():
            return Decision(settings, load_head(settings.head))
        case config.OraclePolicy():
            raise UserError(
                "policy.kind: the oracle knows what the target will write, which only a replay of a"
                " recording does"
            )
    return _POLICIES[type(settings)](settings)
