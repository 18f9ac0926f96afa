"""What forward passes cost, and what the papers' equations make of it. All times are seconds.

Reading a profile needs neither torch nor transformers.
"""

from specdec_core.cost.bounds import (
    GaussianFit,
    RatioFit,
    approximation_bound,
    bretagnolle_huber_bound,
    cross_entropy,
    entropy,
    entropy_ratio,
    entropy_threshold,
    expected_acceptance,
    oracle_bound,
    ratio_bound,
)
from specdec_core.cost.equations import (
    ForwardTimes,
    identity_gap,
    improvement_factor,
    latency,
    oracle_counts,
    post_use_speedup,
    regress_forward_times,
)
from specdec_core.cost.fitting import nonnegative_least_squares, r_squared
from specdec_core.cost.forward import ForwardCost, ForwardKind, Measurement, Terms
from specdec_core.cost.hardware import Hardware, load_hardware
from specdec_core.cost.profile import Profile, draft_key, policy_key

__all__ = [
    "ForwardCost",
    "ForwardKind",
    "ForwardTimes",
    "GaussianFit",
    "Hardware",
    "Measurement",
    "Profile",
    "RatioFit",
    "Terms",
    "approximation_bound",
    "bretagnolle_huber_bound",
    "cross_entropy",
    "draft_key",
    "entropy",
    "entropy_ratio",
    "entropy_threshold",
    "expected_acceptance",
    "identity_gap",
    "improvement_factor",
    "latency",
    "load_hardware",
    "nonnegative_least_squares",
    "oracle_bound",
    "oracle_counts",
    "policy_key",
    "post_use_speedup",
    "r_squared",
    "ratio_bound",
    "regress_forward_times",
]
