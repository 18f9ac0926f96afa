"""Keys and values of the tokens that models have read: rows of any length, in slots."""

from __future__ import annotations

import torch

from specdec_core.models.cache.mapped import MappedCache, MappedStore
from specdec_core.models.cache.pooled import PooledCache
from specdec_core.models.cache.slots import SlotCache, SlotLayer, Store
from specdec_core.models.cache.windows import PackedWindow, SlidingWindow

__all__ = [
    "MappedCache",
    "MappedStore",
    "PackedWindow",
    "PooledCache",
    "SlidingWindow",
    "SlotCache",
    "SlotLayer",
    "Store",
    "open_cache",
]


def open_cache(
    layers: int,
    slots: int,
    positions: int,
    device: torch.device,
    dtype: torch.dtype | None,
    pooled: bool,
    tokens: int | None = None,
) -> SlotCache:
    """A cache for a model on `device`, see :class:`SlotCache`: `pooled` in blocks, for `tokens`
    tokens at first (unset: for all that the slots have room for)."""
    if pooled:
        return PooledCache(layers, slots, positions, device, dtype, tokens)
    return MappedCache(layers, slots, positions, dtype)
