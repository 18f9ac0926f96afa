"""Length policies: after this candidate, draft another one or verify?"""

from specdec_core.policies.base import LengthPolicy, Signals, build_policy

__all__ = ["LengthPolicy", "Signals", "build_policy"]
