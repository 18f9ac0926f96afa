"""The key-value cache in a pool of blocks, for devices that give memory all at once.

A row holds as many blocks as its tokens need, anywhere in the pool; a table on the device says
where. Rows that begin alike hold the blocks of that beginning together.

In the stores' tensors all blocks lie one behind the other, as if they were a single row's. A
forward writes to places that :meth:`PooledCache.at` finds; attention, which reads whole ranges of
rows, uses the table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_core.base.errors import UserError
from specdec_core.models.cache.blocks import BLOCK, PooledBlocks
from specdec_core.models.cache.slots import SlotCache, Store

_GROWTH = 2  # a pool that is too small grows by one such part of it at least


class PooledCache(SlotCache):
    """See this module. The pool is on `device`, for `tokens` tokens and one more block for each row
    (None: for all that rows can hold). Where it is too small it grows.

    `table` (slots, blocks of a row) has the numbers of the blocks that rows hold. Padding is
    written to block 0, which no row holds. `version` changes when the stores' tensors are replaced.
    """

    table: Tensor

    def __init__(
        self,
        layers: int,
        slots: int,
        positions: int,
        device: torch.device,
        dtype: torch.dtype | None = None,
        tokens: int | None = None,
    ) -> None:
        super().__init__(layers, slots, positions, dtype)
        self._count = self.positions // BLOCK  # blocks of a row
        most = slots * self._count
        size = most if tokens is None else min(-(-tokens // BLOCK) + slots, most)
        self.blocks = PooledBlocks(slots, size)
        self.version = 0
        self.table = torch.zeros((slots, self._count), dtype=torch.int32, device=device)
        self._table = torch.zeros((slots, self._count), dtype=torch.int32)  # the same on the host

    def new_store(self, heads: int, size: int, like: Tensor) -> Store:
        """Raises :class:`UserError` where the device's memory does not suffice."""
        return Store(_zeros(self.blocks.size, heads, size, like))

    def at(self, rows: Sequence[int], positions: Sequence[int]) -> tuple[list[int], list[int]]:
        held = self.blocks.rows
        pairs = zip(rows, positions, strict=True)
        places = [held[row][at // BLOCK] * BLOCK + at % BLOCK for row, at in pairs]
        return [0] * len(places), places

    def claim(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        spans = [
            (row, self.lengths[row] // BLOCK, -(-(self.lengths[row] + count) // BLOCK))
            for row, count in zip(rows, counts, strict=True)
        ]
        # More than enough where several rows leave the same block.
        self._ensure(sum(self.blocks.needed(*span) for span in spans))
        for row, first, last in spans:
            for old, new in self.blocks.own(row, first, last):
                self._copy(old * BLOCK, new * BLOCK, BLOCK)
        self._update_table()

    def truncate(self, row: int, length: int) -> None:
        super().truncate(row, length)
        self.blocks.cut(row, -(-length // BLOCK))

    def _begin_like(self, row: int, other: int, length: int) -> None:
        shared = length // BLOCK
        self.blocks.share(row, other, shared)
        if rest := length % BLOCK:
            self._ensure(1)
            self.blocks.own(other, shared, shared + 1)
            source, to = (self.blocks.rows[own][shared] * BLOCK for own in (row, other))
            self._copy(source, to, rest)

    def _copy(self, source: int, to: int, count: int) -> None:
        for store in self.stores():
            places = store.tensor[0]
            places[:, to : to + count] = places[:, source : source + count]

    def _ensure(self, count: int) -> None:
        """Grow the pool until `count` blocks are free."""
        short = count - self.blocks.free
        if short <= 0:
            return
        more = max(short, self.blocks.size // _GROWTH)
        try:
            with torch.inference_mode(False):  # torch.compile takes no other tensors
                for store in self.stores():
                    _, heads, places, size = store.tensor.shape
                    larger = _zeros(self.blocks.size + more, heads, size, store.tensor)
                    larger[:, :, :places] = store.tensor
                    store.tensor = larger
        finally:  # where memory was short the blocks stay those that all stores have
            self.version += 1
            for layer in self.held():
                layer.renew()
        self.blocks.grow(more)

    def _update_table(self) -> None:
        """Copy the blocks of rows that changed to the table on the device."""
        if self.blocks.changed:
            for row in self.blocks.changed:
                held = self.blocks.rows[row]
                padded = [*held, *[0] * (self._count - len(held))]
                self._table[row] = torch.tensor(padded, dtype=torch.int32)
            self.table.copy_(self._table)
            self.blocks.changed.clear()


def _zeros(blocks: int, heads: int, size: int, like: Tensor) -> Tensor:
    """A store's tensor of `blocks` blocks and block 0. Raises :class:`UserError` where the device's
    memory does not suffice."""
    try:
        # Zeros: a masked position still meets its value with weight 0, and 0 · NaN is NaN.
        return like.new_zeros((1, heads, (1 + blocks) * BLOCK, size))
    except torch.OutOfMemoryError:
        raise UserError(
            f"a cache of {blocks * BLOCK} tokens does not fit on {like.device}: fewer slots,"
            " shorter texts (max_length), or fewer tokens together (--cache-tokens)"
        ) from None
