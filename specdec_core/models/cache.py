"""A preallocated key-value cache in which every row (slot) has its own length.

Rolling back rejected tokens is setting a number: what lies beyond a row's length is overwritten by
the next forward and never attended to. The cache implements transformers' cache interface, so a
model's own code writes to it and reads from it. On a CPU rows that begin alike hold that beginning
once (:mod:`specdec_core.models.blocks`).
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specdec_core.models.blocks import BLOCK, Blocks, Run
from specdec_core.models.pages import Pages

# To give memory back and to take it anew for the next text costs a fifth of reading that text. So
# rows that were cut keep what they no longer hold, all together this much:
_SPARE = 1024  # positions,
_SPARE_SHARE = 8  # or one for so many that are held
_MOST_ENTRIES = 16_384  # of the system's 65,530, by which places are led to others' memory


class Window:
    """Where the next forward writes: `width` tokens of each row from that row's offset on. It reads
    these rows, as far as the longest one reaches."""

    def __init__(self, rows: list[int], offsets: list[int], width: int) -> None:
        self.rows, self.offsets, self.width = rows, offsets, width
        self.end = max(offsets) + width
        first, count = rows[0], len(rows)
        consecutive = rows == list(range(first, first + count))
        self.row_slice = slice(first, first + count) if consecutive else None
        self.aligned = len(set(offsets)) == 1
        self._index: tuple[Tensor, Tensor] | None = None

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row numbers (rows, 1) and cache positions (rows, width)."""
        if self._index is None:
            rows = torch.tensor(self.rows, device=device)[:, None]
            offsets = torch.tensor(self.offsets, device=device)[:, None]
            self._index = rows, offsets + torch.arange(self.width, device=device)
        return self._index

    def write(self, store: Tensor, states: Tensor) -> Tensor:
        """Write `states` (rows, heads, width, head size); what is read of `store` then."""
        if self.aligned and self.row_slice is not None:
            start = self.offsets[0]
            store[self.row_slice, :, start : start + self.width] = states
        else:
            rows, positions = self.index(store.device)
            store[rows, :, positions] = states.transpose(1, 2).to(store.dtype)
        read = self.row_slice if self.row_slice is not None else self.rows
        return store[read, :, : self.end]


class PackedWindow:
    """Where the next forward writes that packs all rows into one sequence: `counts[i]` tokens of
    row `rows[i]` from its offset on. It reads the whole cache."""

    def __init__(self, rows: Sequence[int], offsets: Sequence[int], counts: Sequence[int]) -> None:
        self.ends = [offset + count for offset, count in zip(offsets, counts, strict=True)]
        self.end = max(self.ends)
        spans = zip(offsets, self.ends, strict=True)
        # Of each token.
        self.rows = [row for row, n in zip(rows, counts, strict=True) for _ in range(n)]
        self.positions = [place for span in spans for place in range(*span)]
        self._index: Tensor | None = None

    def write(self, store: Tensor, states: Tensor) -> Tensor:
        """Write `states` (1, heads, tokens, head size); what is read of `store` then."""
        if self._index is None:
            self._index = torch.tensor([self.rows, self.positions], device=store.device)
        rows, positions = self._index
        store[rows, :, positions] = states[0].transpose(0, 1).to(store.dtype)
        return store


class Store:
    """States of every position of every slot, (slots, heads, positions, size)."""

    def __init__(self, cache: SlotCache, heads: int, size: int, like: Tensor) -> None:
        """Of the data type and on the device of `like`."""
        # Zeros: a masked position still meets its value with weight 0, and 0 · NaN is NaN.
        self._shape = shape = (cache.slots, heads, cache.positions, size)
        self._pages = Pages(shape, like.dtype) if like.device.type == "cpu" else None
        self.tensor = self._pages.tensor if self._pages else like.new_zeros(shape)
        self._place = size * like.dtype.itemsize  # bytes of a position
        whole = BLOCK * self._place % mmap.PAGESIZE == 0
        self.shares = self._pages is not None and self._pages.shares and whole

    @property
    def heads(self) -> int:
        """Stretches of memory of each row."""
        return self._shape[1]

    @property
    def taken(self) -> int | None:
        """Bytes of memory in use, on a CPU."""
        return None if self._pages is None else self._pages.taken

    def move(self, run: Run) -> None:
        """Let a row have what is in other memory."""
        assert self._pages is not None
        size = run.count * BLOCK * self._place
        for head in range(self.heads):
            home = self._start(run.home_row, head, run.home_block)
            self._pages.lead(self._start(run.row, head, run.block), size, home)

    def release(self, run: Run) -> None:
        """Give back the memory of a run, on a CPU: what it held is lost."""
        if self._pages is None:
            return
        size = run.count * BLOCK * self._place
        for head in range(self.heads):
            home = self._start(run.home_row, head, run.home_block)
            self._pages.release(home, home + size)

    def _start(self, row: int, head: int, block: int) -> int:
        """The first byte of a block."""
        _, heads, positions, _ = self._shape
        return ((row * heads + head) * positions + block * BLOCK) * self._place


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, (slots, heads, positions, head size) each."""

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
            self.stores.append(Store(self.cache, states.shape[1], states.shape[3], like))
        self.keys, self.values = (store.tensor for store in self.stores)
        self.is_initialized = True

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
    (:meth:`keep_features`)."""

    def __init__(
        self, layers: int, slots: int, positions: int, dtype: torch.dtype | None = None
    ) -> None:
        blocks = -(-positions // BLOCK)
        self.slots, self.positions, self.dtype = slots, blocks * BLOCK, dtype
        self.lengths = [0] * slots
        self.blocks = Blocks(slots, blocks)
        self._used = [0] * slots  # positions of each row that take memory
        self.window: Window | PackedWindow = Window([0], [0], 1)
        self.features: Store | None = None
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])

    def open_window(self, rows: Sequence[int], width: int) -> Window:
        """Make the next forward write after each row's valid tokens. Raises :class:`ValueError`
        where a row has no room for `width` more."""
        rows = list(rows)
        window = Window(rows, [self.lengths[row] for row in rows], width)
        self._open(window, rows, [width] * len(rows))
        return window

    def open_packed(self, rows: Sequence[int], counts: Sequence[int]) -> PackedWindow:
        """The same for `counts[i]` more tokens of row `rows[i]`, packed into one sequence."""
        window = PackedWindow(rows, [self.lengths[row] for row in rows], counts)
        self._open(window, rows, counts)
        return window

    def _open(
        self, window: Window | PackedWindow, rows: Sequence[int], counts: Sequence[int]
    ) -> None:
        if window.end > self.positions:
            raise ValueError(f"{window.end} tokens do not fit in a slot of {self.positions}")
        self.claim(rows, counts)
        self.window = window

    def fits(self, rows: Iterable[int], counts: Iterable[int]) -> bool:
        """Whether each row has room for so many more tokens."""
        pairs = zip(rows, counts, strict=True)
        return all(self.lengths[row] + count <= self.positions for row, count in pairs)

    def claim(self, rows: Iterable[int], counts: Iterable[int]) -> None:
        """Have the memory of so many positions after each row's tokens be the row's own, before
        something is written there."""
        if self.blocks.saved:
            for row, count in zip(rows, counts, strict=True):
                self._own(row, self.lengths[row], self.lengths[row] + count)

    def append(self, rows: Iterable[int], counts: Iterable[int]) -> None:
        """Count tokens that have been written after those of each row."""
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count
            self._used[row] = max(self._used[row], self.lengths[row])

    def truncate(self, row: int, length: int) -> None:
        """Forget everything of `row` past its first `length` tokens."""
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
                self._release(row, self.lengths[row])

    def held(self) -> list[SlotLayer]:
        """The layers that this process runs; another process may run others."""
        held = (layer for layer in self.layers if isinstance(layer, SlotLayer))
        return [layer for layer in held if layer.is_initialized]

    def keep_features(self, size: int, like: Tensor) -> None:
        """From now on keep so many numbers of each token, of the type and on the device of
        `like`."""
        self.features = Store(self, 1, size, like)

    def _stores(self) -> list[Store]:
        """All that is kept of tokens in this process."""
        stores = [store for layer in self.held() for store in layer.stores]
        return stores if self.features is None else [*stores, self.features]

    @property
    def taken(self) -> int:
        """Bytes of memory in use, where the system says."""
        return sum(store.taken or 0 for store in self._stores())

    @torch.inference_mode()
    def fork(self, row: int, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Make `rows[i]` hold the first `lengths[i]` tokens of `row`: its whole blocks where memory
        can be shared, and a copy of the rest."""
        for other, length in zip(rows, lengths, strict=True):
            if other != row:
                self._begin_like(row, other, length)
            self.lengths[other] = length
            self._used[other] = max(self._used[other], length)

    def _begin_like(self, row: int, other: int, length: int) -> None:
        stores = self._stores()
        shared = length // BLOCK if self._shares(stores) else 0
        moved, unused = self.blocks.share(row, other, shared)
        for store in stores if moved else ():
            if store.shares:
                for run in moved:
                    store.move(run)
                for run in unused:
                    store.release(run)
        # What it held beyond, it may have shared with a third one.
        self._own(other, shared * BLOCK, max(self._used[other], length))
        for store in stores:
            start = shared * BLOCK if store.shares else 0
            store.tensor[other, :, start:length] = store.tensor[row, :, start:length]

    def _shares(self, stores: Sequence[Store]) -> bool:
        """Whether rows may share memory: a stretch of it costs entries of the system's."""
        heads = sum(store.heads for store in stores if store.shares)
        runs = sum(len(self.blocks.runs(row)) for row in range(self.slots))
        return 0 < heads * 2 * (runs + 1) <= _MOST_ENTRIES

    def _own(self, row: int, start: int, end: int) -> None:
        """Have the memory of positions [start, end) of `row` be nobody else's; what the row holds
        before `start` stays."""
        first = start // BLOCK
        moved = self.blocks.own(row, first, -(-end // BLOCK))
        for store in self._stores() if moved else ():
            if store.shares:
                kept = store.tensor[row, :, first * BLOCK : start].clone()
                for run in moved:
                    store.move(run)
                store.tensor[row, :, first * BLOCK : start] = kept

    def _release(self, row: int, length: int) -> None:
        """Give back the memory of what `row` held beyond `length`."""
        first = -(-length // BLOCK)
        self._own(row, first * BLOCK, self._used[row])
        at_home = [Run(row, first, row, first, self.blocks.count - first)]
        for store in self._stores():
            for run in self.blocks.runs(row, first) if store.shares else at_home:
                store.release(run)
        self._used[row] = length

    @torch.inference_mode()
    def keep(self, row: int, start: int, kept: Sequence[int]) -> None:
        """Compact `row`: of the positions from `start` on keep those at `start + i` for i in `kept`
        (increasing), in this order, and make them the row's end. No recomputation."""
        settled = next((n for n, place in enumerate(kept) if place != n), len(kept))
        if settled < len(kept):
            stores = self._stores()
            source = torch.tensor(kept[settled:], device=stores[0].tensor.device) + start
            end = start + len(kept)
            for store in (each.tensor[row] for each in stores):
                store[:, start + settled : end] = store.index_select(1, source)
        self.lengths[row] = start + len(kept)
