"""What forward passes cost, and what the papers' equations make of it. All times are seconds.

Reading a profile needs neither torch nor transformers.
"""

from specdec_core.cost.equations import latency, oracle_counts
from specdec_core.cost.forward import ForwardCost, ForwardKind, Measurement, Terms
from specdec_core.cost.hardware import Hardware, load_hardware
from specdec_core.cost.profile import Profile, draft_key, policy_key

__all__ = [
    "ForwardCost",
    "ForwardKind",
    "Hardware",
    "Measurement",
    "Profile",
    "Terms",
    "draft_key",
    "latency",
    "load_hardware",
    "oracle_counts",
    "policy_key",
]
