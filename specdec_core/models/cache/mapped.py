"""A slot cache in memory that the system gives page by page, as on a CPU.

Every row has addresses for all that it may ever hold, and takes memory for what it holds. Rows that
begin alike have the same memory there (:mod:`specdec_core.models.cache.blocks`). On other devices
the memory is there from the beginning, and a beginning is copied.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specdec_core.models.cache.blocks import BLOCK, BlockRun, Blocks
from specdec_core.models.cache.pages import Pages
from specdec_core.models.cache.slots import SlotCache, Store

# To give memory back and to take it anew for the next text costs a fifth of reading that text. So
# rows that were cut keep what they no longer hold, all together this much:
_SPARE = 1024  # positions,
_SPARE_SHARE = 8  # or one for so many that are held
_PADDED = 1024  # positions behind a row's tokens that padding may have written to
_MOST_ENTRIES = 16_384  # of the system's 65,530, by which places are led to others' memory


class MappedStore(Store):
    """States of every position of every slot, of this shape (slots, heads, positions, size)."""

    def __init__(self, shape: tuple[int, int, int, int], like: Tensor) -> None:
        """Of the data type and on the device of `like`."""
        # Zeros: a masked position still meets its value with weight 0, and 0 · NaN is NaN.
        self._shape = shape
        self._pages = Pages(shape, like.dtype) if like.device.type == "cpu" else None
        super().__init__(self._pages.tensor if self._pages else like.new_zeros(shape))
        self._place = shape[-1] * like.dtype.itemsize  # bytes of a position
        whole = BLOCK * self._place % mmap.PAGESIZE == 0
        self.shares = self._pages is not None and self._pages.shares and whole

    @property
    def heads(self) -> int:
        """Stretches of memory of each row."""
        return self._shape[1]

    @property
    def taken(self) -> int | None:
        return super().taken if self._pages is None else self._pages.taken

    def move(self, run: BlockRun) -> None:
        """Let a row have what is in other memory."""
        assert self._pages is not None
        size = run.count * BLOCK * self._place
        for head in range(self.heads):
            home = self._start(run.home_row, head, run.home_block)
            self._pages.lead(self._start(run.row, head, run.block), size, home)

    def release(self, run: BlockRun) -> None:
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


class MappedCache(SlotCache):
    """See this module."""

    def __init__(
        self, layers: int, slots: int, positions: int, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(layers, slots, positions, dtype)
        self.blocks = Blocks(slots, self.positions // BLOCK)
        self._used = [0] * slots  # positions of each row that take memory

    def new_store(self, heads: int, size: int, like: Tensor) -> MappedStore:
        return MappedStore((self.slots, heads, self.positions, size), like)

    def at(self, rows: Sequence[int], positions: Sequence[int]) -> tuple[list[int], list[int]]:
        return list(rows), list(positions)

    def claim(self, rows: Iterable[int], counts: Iterable[int]) -> None:
        if self.blocks.saved:
            for row, count in zip(rows, counts, strict=True):
                self._own(row, self.lengths[row], self.lengths[row] + count)

    def append(self, rows: Iterable[int], counts: Iterable[int]) -> None:
        rows = list(rows)
        super().append(rows, counts)
        for row in rows:
            self._used[row] = max(self._used[row], self.lengths[row])

    def truncate(self, row: int, length: int) -> None:
        self._checked(row, length)
        self.lengths[row] = length
        if self._used[row] - length > BLOCK:
            self._bound_spare(row)

    @torch.inference_mode()
    def blank(self, row: int, length: int) -> None:
        end = min(self.lengths[row] + _PADDED, self.positions)
        self.truncate(row, length)
        self._own(row, length, end)
        for store in self.stores():
            store.tensor[row, :, length:end] = 0

    def _bound_spare(self, cut: int) -> None:
        """Give back memory that holds nothing, where there is much of it: first that of row
        `cut`."""
        most = max(_SPARE, sum(self.lengths) // _SPARE_SHARE)
        for row in (cut, *range(self.slots)):
            if sum(self._used) - sum(self.lengths) <= most:
                return
            if self._used[row] - self.lengths[row] > BLOCK:
                self._release(row, self.lengths[row])

    def _mapped(self) -> list[MappedStore]:
        return [store for store in self.stores() if isinstance(store, MappedStore)]

    def _begin_like(self, row: int, other: int, length: int) -> None:
        stores = self._mapped()
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
        self._used[other] = max(self._used[other], length)

    def _shares(self, stores: Sequence[MappedStore]) -> bool:
        """Whether rows may share memory: a stretch of it costs entries of the system's."""
        heads = sum(store.heads for store in stores if store.shares)
        runs = sum(len(self.blocks.runs(row)) for row in range(self.slots))
        return 0 < heads * 2 * (runs + 1) <= _MOST_ENTRIES

    def _own(self, row: int, start: int, end: int) -> None:
        """Have the memory of positions [start, end) of `row` be nobody else's; what the row holds
        before `start` stays."""
        first = start // BLOCK
        moved = self.blocks.own(row, first, -(-end // BLOCK))
        for store in self._mapped() if moved else ():
            if store.shares:
                kept = store.tensor[row, :, first * BLOCK : start].clone()
                for run in moved:
                    store.move(run)
                store.tensor[row, :, first * BLOCK : start] = kept

    def _release(self, row: int, length: int) -> None:
        """Give back the memory of what `row` held beyond `length`."""
        first = -(-length // BLOCK)
        self._own(row, first * BLOCK, self._used[row])
        at_home = [BlockRun(row, first, row, first, self.blocks.count - first)]
        for store in self._mapped():
            for run in self.blocks.runs(row, first) if store.shares else at_home:
                store.release(run)
        self._used[row] = length
