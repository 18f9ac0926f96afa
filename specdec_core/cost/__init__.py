"""What forward passes cost, and what the papers' equations make of it. All times are seconds.

Reading a profile needs neither torch nor transformers.
"""

from specdec_core.cost.equations import (
    ForwardTimes,
    identity_gap,
    improvement_factor,
    latency,
    oracle_counts,
    regress_forward_times,
)
from specdec_core.cost.fitting import nonnegative_least_squares, r_squared
from specdec_core.cost.forward import ForwardCost, Kind, Measurement, Terms
from specdec_core.cost.hardware import Hardware, load_hardware
from specdec_core.cost.measuring import BATCHES, CONTEXTS, WIDTHS, profile_pair
from specdec_core.cost.profile import Profile

__all__ = [
    "BATCHES",
    "CONTEXTS",
    "WIDTHS",
    "ForwardCost",
    "ForwardTimes",
    "Hardware",
    "Kind",
    "Measurement",
    "Profile",
    "Terms",
    "identity_gap",
    "improvement_factor",
    "latency",
    "load_hardware",
    "nonnegative_least_squares",
    "oracle_counts",
    "profile_pair",
    "r_squared",
    "regress_forward_times",
]
