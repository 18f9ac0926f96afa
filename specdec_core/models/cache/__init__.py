"""The key-value cache: rows of any length, one for each slot."""

from specdec_core.models.cache.pooled import PooledCache
from specdec_core.models.cache.slots import SlotCache, SlotLayer, Store

__all__ = ["PooledCache", "SlotCache", "SlotLayer", "Store"]
