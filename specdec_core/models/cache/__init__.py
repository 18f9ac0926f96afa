"""Keys and values of the tokens that models have read: rows of any length, in slots."""

from specdec_core.models.cache.mapped import MappedCache, MappedStore
from specdec_core.models.cache.pooled import PooledCache
from specdec_core.models.cache.slots import SlotCache, SlotLayer, Store
from specdec_core.models.cache.windows import PackedWindow, Window

__all__ = [
    "MappedCache",
    "MappedStore",
    "PackedWindow",
    "PooledCache",
    "SlotCache",
    "SlotLayer",
    "Store",
    "Window",
]
