"""Attention of packed rows, each to its own part of the cache."""

from specdec_core.models.row_attention.plans import MaskedSpans, RowTokens, SeenPlaces
from specdec_core.models.row_attention.row_mask import RowMask

__all__ = ["MaskedSpans", "RowMask", "RowTokens", "SeenPlaces"]
