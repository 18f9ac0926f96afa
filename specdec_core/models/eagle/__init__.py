"""EAGLE heads: drafts that read the target's hidden states (EAGLE, Li et al. 2024; EAGLE-3,
2025)."""

from specdec_core.models.eagle.head import AnyHead, EagleHead, EagleOneHead
from specdec_core.models.eagle.settings import EagleSettings

__all__ = ["AnyHead", "EagleHead", "EagleOneHead", "EagleSettings"]
