"""Attention of packed rows, each to its own part of the cache."""

from specdec_core.models.row_attention.plans import (
    MaskedSpans,
    OperatorPlan,
    RowMask,
    RowPlan,
    RowTokens,
    SeenPlaces,
)
from specdec_core.models.row_attention.sequence import PackedSequence

__all__ = [
    "MaskedSpans",
    "OperatorPlan",
    "PackedSequence",
    "RowMask",
    "RowPlan",
    "RowTokens",
    "SeenPlaces",
]
