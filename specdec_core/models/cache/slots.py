"""The key-value cache, in which every row (slot) has its own length.

Rolling back rejected tokens is setting a number: what lies beyond a row's length is overwritten by
a later forward before anything reads it. The cache implements transformers' cache interface, so a
model's own code writes to it and reads from it."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specdec_core.base.errors import UserError
from specdec_core.models.cache.blocks import BLOCK
from specdec_core.models.cache.window import CacheWindow

# Giving memory back and taking it again for the next sequence costs a fifth of that prefill. So
# rows that were cut keep some memory that holds nothing, all rows together this much:
_SPARE = 1024  # positions,
_SPARE_SHARE = 8  # or one for this many that are held


class Store:
    """What is kept of every token: a `tensor` (rows, heads, positions, size). On a CPU the system
    gives its `memory` page by page, at the first write to each page."""

    def __init__(self, tensor: Tensor, memory: mmap.mmap | None = None) -> None:
        self.tensor, self._memory = tensor, memory

    @classmethod
    def by_pages(cls, shape: Sequence[int], dtype: torch.dtype) -> Store:
        """A store of zeros on the CPU, in such memory. Raises OutOfMemoryError where there is
        none."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        try:
            memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            said = f"{size / 2**20:.0f} MiB of memory: {error.strerror}"
            raise torch.OutOfMemoryError(said) from None
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would hold the unused ends of many rows
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        return cls(torch.frombuffer(memory, dtype=dtype, count=count).view(*shape), memory)

    def release(self, row: int, first: int) -> None:
        """Give back the memory of `row` from position `first` on; what it held is lost."""
        if self._memory is None:
            return
        _, heads, positions, size = self.tensor.shape
        place = size * self.tensor.dtype.itemsize  # bytes
        for head in range(heads):
            begin = (row * heads + head) * positions
            start = -(-(begin + first) * place // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (begin + positions) * place // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start:
                self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, (rows, heads, positions, head size) each."""

    keys: Tensor
    values: Tensor

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' own
        # The cache holds its layers; held by them in turn, it would outlive its last user.
        self.cache: SlotCache = weakref.proxy(cache)
        self.stores: list[Store] = []

    @torch.inference_mode(False)  # torch.compile takes no other tensors
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        dtype = self.cache.dtype or key_states.dtype
        self.stores = [
            self.cache.new_store(
                states.shape[1], states.shape[3], torch.empty(0, dtype=dtype, device=states.device)
            )
            for states in (key_states, value_states)
        ]
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


class SlotCache(Cache):
    """Keys and values of `slots` rows of up to `positions` tokens, for `layers` layers, in `dtype`
    or else in the model's own. `features` are further states of each token, where they are kept
    (:meth:`keep_features`).

    Every row has addresses for all that it may ever hold. On a CPU it takes memory for what it
    holds. For devices that give memory all at once see
    :class:`~specdec_core.models.cache.pooled.PooledCache`.
    """

    table: Tensor | None = None  # where attention finds a row's positions, if not in its own row

    def __init__(
        self, layers: int, slots: int, positions: int, dtype: torch.dtype | None = None
    ) -> None:
        self.slots, self.dtype = slots, dtype
        self.positions = -(-positions // BLOCK) * BLOCK
        self.lengths = [0] * slots
        self.window = CacheWindow([0], [0], [1])
        self.features: Store | None = None
        self._used = [0] * slots  # positions of each row that take memory
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])

    def new_store(self, heads: int, size: int, like: Tensor) -> Store:
        """Room for states of every token, `heads` times `size` numbers each, of the data type and
        on the device of `like`. Raises :class:`UserError` where its memory does not suffice."""
        shape = self.slots, heads, self.positions, size
        try:
            on_cpu = like.device.type == "cpu"
            return Store.by_pages(shape, like.dtype) if on_cpu else Store(like.new_zeros(shape))
        except torch.OutOfMemoryError:
            raise UserError(
                f"a cache of {self.slots} rows of {self.positions} tokens does not fit on"
                f" {like.device}: fewer slots, or shorter texts (max_length)"
            ) from None

    def open_window(
        self, rows: Sequence[int], counts: Sequence[int], own_row_only: bool = False
    ) -> CacheWindow:
        """Make the next forward write `counts[i]` tokens at the end of row `rows[i]`, see
        :class:`CacheWindow`. Raises :class:`ValueError` where a row has no room for them."""
        lengths = [self.lengths[row] for row in rows]
        end = max(length + count for length, count in zip(lengths, counts, strict=True))
        if end > self.positions:
            raise ValueError(f"{end} tokens do not fit in a slot of {self.positions}")
        self.claim(rows, counts)
        self.window = window = CacheWindow(rows, lengths, counts, own_row_only)
        window.rows, window.positions = self.at(window.rows, window.positions)
        window.neighbours = len(rows) == 1 and self.table is None
        return window

    def claim(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Give row `rows[i]` memory for `counts[i]` more positions that it shares with no other
        row. Called before a forward writes them."""

    def at(self, rows: Sequence[int], positions: Sequence[int]) -> tuple[list[int], list[int]]:
        """Where in the stores' tensors `positions[i]` of `rows[i]` is: rows and positions."""
        return list(rows), list(positions)

    def append(self, rows: Iterable[int], counts: Iterable[int]) -> None:
        """Count `counts[i]` tokens that have been written at the end of row `rows[i]`."""
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count
            self._used[row] = max(self._used[row], self.lengths[row])

    def truncate(self, row: int, length: int) -> None:
        """Forget everything of `row` past its first `length` tokens. Raises :class:`ValueError`
        where it holds fewer."""
        if length > self.lengths[row]:
            raise ValueError(f"row {row} holds {self.lengths[row]} tokens, cannot keep {length}")
        self.lengths[row] = length
        if self._used[row] - length > BLOCK:
            self._bound_spare(row)

    def _bound_spare(self, cut: int) -> None:
        """Give back memory that holds nothing, where there is much of it: first that of row
        `cut`."""
        most = max(_SPARE, sum(self.lengths) // _SPARE_SHARE)
        for row in (cut, *range(self.slots)):
            if sum(self._used) - sum(self.lengths) <= most:
                return
            if self._used[row] - self.lengths[row] > BLOCK:
                for store in self.stores():
                    store.release(row, self.lengths[row])
                self._used[row] = self.lengths[row]

    @torch.inference_mode()
    def fork(self, row: int, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Make `rows[i]` hold the first `lengths[i]` tokens of `row`, and nothing else."""
        for other, length in zip(rows, lengths, strict=True):
            if other != row:
                self._begin_like(row, other, length)
            self.lengths[other] = length
            self._used[other] = max(self._used[other], length)

    def _begin_like(self, row: int, other: int, length: int) -> None:
        """Make `other` hold the first `length` tokens of `row`, a different row."""
        for store in self.stores():
            store.tensor[other, :, :length] = store.tensor[row, :, :length]

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

    def held(self) -> list[SlotLayer]:
        """The layers that this process runs; a model may be split among processes."""
        layers = (layer for layer in self.layers if isinstance(layer, SlotLayer))
        return [layer for layer in layers if layer.is_initialized]

    @property
    def held_numbers(self) -> list[int]:
        """The numbers, in the model, of the layers that this process runs."""
        held = self.held()
        return [number for number, layer in enumerate(self.layers) if layer in held]

    @torch.inference_mode(False)
    def keep_features(self, size: int, like: Tensor) -> None:
        """From now on keep `size` numbers of each token, of the data type and on the device of
        `like`."""
        self.features = self.new_store(1, size, like)

    def stores(self) -> list[Store]:
        """All that is kept of tokens in this process."""
        stores = [store for layer in self.held() for store in layer.stores]
        return stores if self.features is None else [*stores, self.features]
