"""The slot cache as a graph takes it: tensors of keys, values and places."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class TensorLayer(CacheLayerMixin):
    """A layer of the slot cache that writes to places given as tensors."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor, places: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' own
        self.keys, self.values, self.is_initialized = keys, values, True
        self._at = rows, slice(None), places

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the tensors exist."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys[self._at] = key_states[0].transpose(0, 1).to(self.keys.dtype)
        self.values[self._at] = value_states[0].transpose(0, 1).to(self.values.dtype)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]
