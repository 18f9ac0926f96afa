"""What forward passes cost, and what the papers' equations make of it. All times are seconds.

Reading a profile needs neither torch nor transformers.
"""

from specdec_core.cost.forward import ForwardCost, ForwardKind, ForwardTerms, Measurement, Work
from specdec_core.cost.profile import Profile, draft_key, policy_key, proposer_keys

__all__ = [
    "ForwardCost",
    "ForwardKind",
    "ForwardTerms",
    "Measurement",
    "Profile",
    "Work",
    "draft_key",
    "policy_key",
    "proposer_keys",
]
