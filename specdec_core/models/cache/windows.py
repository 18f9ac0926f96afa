"""Where a forward writes to a cache, and what it reads of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SlidingWindow:
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
    row `rows[i]` from its offset on. It reads the whole cache.

    The tokens of row i then end at position `ends[i]` of the row; `rows` and `positions` say of
    each token where in the cache's tensors it is written."""

    def __init__(self, rows: Sequence[int], offsets: Sequence[int], counts: Sequence[int]) -> None:
        self.ends = [offset + count for offset, count in zip(offsets, counts, strict=True)]
        self.end = max(self.ends)
        spans = zip(offsets, self.ends, strict=True)
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
