"""A preallocated key-value cache in which every row (slot) has its own length.

Rolling back rejected tokens is setting a number: what lies beyond a row's length is overwritten by
the next forward and never attended to. The cache implements transformers' cache interface, so a
model's own code writes to it and reads from it. Where its memory is, and how rows that begin alike
hold that beginning once, differs from device to device: see
:mod:`specdec_core.models.cache.mapped` and :mod:`specdec_core.models.cache.pooled`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specdec_core.models.cache.blocks import BLOCK
from specdec_core.models.cache.windows import PackedWindow, SlidingWindow


class Store:
    """What is kept of every token: a `tensor` (rows, heads, positions, size)."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def taken(self) -> int | None:
        """Bytes of memory in use, where it is known."""
        return self.tensor.nbytes


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, (rows, heads, positions, head size) each."""

    keys: Tensor
    values: Tensor

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' own
        # The cache holds its layers: so that both, and their memory, go with who holds the cache.
        self.cache: SlotCache = weakref.proxy(cache)
        self.stores: list[Store] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        dtype = self.cache.dtype or key_states.dtype
        for states in (key_states, value_states):
            like = states[:0].to(dtype)
            self.stores.append(self.cache.new_store(states.shape[1], states.shape[3], like))
        self.renew()
        self.is_initialized = True

    def renew(self) -> None:
        """Take the stores' tensors as they are now."""
        self.keys, self.values = (store.tensor for store in self.stores)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.cache.window
        return window.write(self.keys, key_states), window.write(self.values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.window.end, 0

    def get_seq_length(self) -> int:
        return max(self.cache.lengths)

    def get_max_length(self) -> int:
        return self.cache.positions


class SlotCache(Cache, ABC):
    """Keys and values of `slots` rows of up to `positions` tokens, for `layers` layers, in `dtype`
    or else in the model's own. `features` are further states of each token, where they are kept
    (:meth:`keep_features`)."""

    table: Tensor | None = None  # where attention finds a row's positions, if not in its own row

    def __init__(
        self, layers: int, slots: int, positions: int, dtype: torch.dtype | None = None
    ) -> None:
        self.slots, self.dtype = slots, dtype
        self.positions = -(-positions // BLOCK) * BLOCK
        self.lengths = [0] * slots
        self.window: SlidingWindow | PackedWindow = SlidingWindow([0], [0], 1)
        self.features: Store | None = None
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])

    @abstractmethod
    def new_store(self, heads: int, size: int, like: Tensor) -> Store:
        """Room for states of every token, `heads` times `size` numbers each, of the data type and
        on the device of `like`."""

    @abstractmethod
    def claim(self, rows: Iterable[int], counts: Iterable[int]) -> None:
        """Have memory for so many positions after each row's tokens, which is nobody else's, before
        something is written there."""

    @abstractmethod
    def truncate(self, row: int, length: int) -> None:
        """Forget everything of `row` past its first `length` tokens. Raises :class:`ValueError`
        where it holds fewer."""

    @abstractmethod
    def blank(self, row: int, length: int) -> None:
        """The same, and overwrite with zeros what `row` alone held there."""

    @abstractmethod
    def _begin_like(self, row: int, other: int, length: int) -> None:
        """Have `other` hold the first `length` tokens of `row`, a different row."""

    @abstractmethod
    def at(self, rows: Sequence[int], positions: Sequence[int]) -> tuple[list[int], list[int]]:
        """Where in the stores' tensors `positions[i]` of `rows[i]` is: rows and positions."""

    def open_window(self, rows: Sequence[int], width: int) -> SlidingWindow:
        """Make the next forward write after each row's valid tokens. Raises :class:`ValueError`
        where a row has no room for `width` more."""
        rows = list(rows)
        offsets = [self.lengths[row] for row in rows]
        self._claim_all(rows, [width] * len(rows))
        self.window = window = self._window(rows, offsets, width)
        return window

    def open_packed(self, rows: Sequence[int], counts: Sequence[int]) -> PackedWindow:
        """The same for `counts[i]` more tokens of row `rows[i]`, packed into one sequence."""
        self._claim_all(rows, counts)
        self.window = window = PackedWindow(rows, [self.lengths[row] for row in rows], counts)
        window.rows, window.positions = self.at(window.rows, window.positions)
        return window

    def _window(self, rows: list[int], offsets: list[int], width: int) -> SlidingWindow:
        return SlidingWindow(rows, offsets, width)

    def _claim_all(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        end = max(self.lengths[row] + count for row, count in zip(rows, counts, strict=True))
        if end > self.positions:
            raise ValueError(f"{end} tokens do not fit in a slot of {self.positions}")
        self.claim(rows, counts)

    def fits(self, rows: Iterable[int], counts: Iterable[int]) -> bool:
        """Whether each row has room for so many more tokens."""
        pairs = zip(rows, counts, strict=True)
        return all(self.lengths[row] + count <= self.positions for row, count in pairs)

    def append(self, rows: Iterable[int], counts: Iterable[int]) -> None:
        """Count tokens that have been written after those of each row."""
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count

    def held(self) -> list[SlotLayer]:
        """The layers that this process runs; another process may run others."""
        held = (layer for layer in self.layers if isinstance(layer, SlotLayer))
        return [layer for layer in held if layer.is_initialized]

    def keep_features(self, size: int, like: Tensor) -> None:
        """From now on keep so many numbers of each token, of the type and on the device of
        `like`."""
        self.features = self.new_store(1, size, like)

    def stores(self) -> list[Store]:
        """All that is kept of tokens in this process."""
        stores = [store for layer in self.held() for store in layer.stores]
        return stores if self.features is None else [*stores, self.features]

    @property
    def taken(self) -> int:
        """Bytes of memory in use, where it is known."""
        return sum(store.taken or 0 for store in self.stores())

    @torch.inference_mode()
    def fork(self, row: int, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Make `rows[i]` hold the first `lengths[i]` tokens of `row`: its whole blocks where memory
        can be shared, and a copy of the rest."""
        for other, length in zip(rows, lengths, strict=True):
            if other != row:
                self._begin_like(row, other, length)
            self.lengths[other] = length

    @torch.inference_mode()
    def keep(self, row: int, start: int, kept: Sequence[int]) -> None:
        """Compact `row`: of the positions from `start` on keep those at `start + i` for i in `kept`
        (increasing), in this order, and make them the row's end. No recomputation."""
        settled = next((n for n, place in enumerate(kept) if place != n), len(kept))
        if settled < len(kept):
            stores, moved = self.stores(), kept[settled:]
            both = [*range(start + settled, start + len(kept)), *(start + n for n in moved)]
            (line, *_), places = self.at([row] * len(both), both)
            index = torch.tensor(places, device=stores[0].tensor.device)
            first, end = places[0], places[0] + len(moved)
            # Mostly neighbours, which are written faster as such.
            together = places[: len(moved)] == [*range(first, end)]
            target = slice(first, end) if together else index[: len(moved)]
            for tensor in (store.tensor[line] for store in stores):
                tensor[:, target] = tensor.index_select(1, index[len(moved) :])
        self.lengths[row] = start + len(kept)

    def _checked(self, row: int, length: int) -> None:
        if length > self.lengths[row]:
            raise ValueError(f"row {row} holds {self.lengths[row]} tokens, cannot keep {length}")
