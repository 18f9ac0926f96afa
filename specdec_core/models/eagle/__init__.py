"""EAGLE heads: drafts that read what the target has computed of the text (EAGLE, Li et al. 2024;
EAGLE-3, 2025)."""

from specdec_core.models.eagle.any_head import AnyHead
from specdec_core.models.eagle.eagle_one import EagleOneHead
from specdec_core.models.eagle.head import EagleHead
from specdec_core.models.eagle.settings import EagleSettings

__all__ = ["AnyHead", "EagleHead", "EagleOneHead", "EagleSettings"]
