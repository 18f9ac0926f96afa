"""The key-value cache: rows of any length, one for each slot."""

from __future__ import annotations

import torch

from specdec_core.models.cache.pooled import PooledCache
from specdec_core.models.cache.slots import SlotCache, SlotLayer, Store
from specdec_core.models.cache.window import CacheWindow

__all__ = ["CacheWindow", "PooledCache", "SlotCache", "SlotLayer", "Store", "open_cache"]


def open_cache(
    layers: int,
    slots: int,
    positions: int,
    device: torch.device,
    dtype: torch.dtype | None,
    pooled: bool,
    tokens: int | None = None,
) -> SlotCache:
    """A cache for a model on `device`, see :class:`SlotCache`. A `pooled` one takes memory for
    `tokens` tokens at first (None: for all that the rows can hold)."""
    if pooled:
        return PooledCache(layers, slots, positions, device, dtype, tokens)
    return SlotCache(layers, slots, positions, dtype)
