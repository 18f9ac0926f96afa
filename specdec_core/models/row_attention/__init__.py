"""Attention of packed rows, each to its own part of the cache."""

from specdec_core.models.row_attention.plans import (
    MaskedSpans,
    RowTokens,
    SeenPlaces,
    SeenTensors,
)
from specdec_core.models.row_attention.row_mask import RowMask, RowPlan
from specdec_core.models.row_attention.sequence import PackedSequence

__all__ = [
    "MaskedSpans",
    "PackedSequence",
    "RowMask",
    "RowPlan",
    "RowTokens",
    "SeenPlaces",
    "SeenTensors",
]
