"""Where a forward writes to the cache, and what it reads of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class CacheWindow:
    """Where the next forward writes: `counts[i]` tokens of row `rows[i]` after the `lengths[i]`
    that it holds, all of them one packed sequence.

    The tokens of row i then end at position `ends[i]` of the row. `rows` and `positions` say for
    each token where in the cache's tensors it is written. The forward reads the whole cache; with
    `own_row_only`, that of a single row, it reads what that row holds, as transformers' attention
    expects it.
    """

    def __init__(
        self,
        rows: Sequence[int],
        lengths: Sequence[int],
        counts: Sequence[int],
        own_row_only: bool = False,
    ) -> None:
        self.ends = [length + count for length, count in zip(lengths, counts, strict=True)]
        self.end = max(self.ends)
        spans = zip(lengths, self.ends, strict=True)
        self.rows = [row for row, n in zip(rows, counts, strict=True) for _ in range(n)]
        self.positions = [place for span in spans for place in range(*span)]
        self.own_row_only = own_row_only
        self.neighbours = False  # whether all tokens lie side by side in one row of the tensors
        self._index: Tensor | None = None

    def write(self, store: Tensor, states: Tensor) -> Tensor:
        """Write `states` (1, heads, tokens, size) to `store`; returns what is read of it then."""
        row, first = self.rows[0], self.positions[0]
        if self.neighbours:  # which are written faster as such
            store[row, :, first : first + len(self.rows)] = states[0]
        else:
            if self._index is None:
                self._index = torch.tensor([self.rows, self.positions], device=store.device)
            rows, positions = self._index
            store[rows, :, positions] = states[0].transpose(0, 1).to(store.dtype)
        return store[row : row + 1, :, : self.end] if self.own_row_only else store
