"""The blocks of a pool, and which of them each row of the cache holds."""

from __future__ import annotations

BLOCK = 64  # positions; a multiple of what the GPU's attention kernel reads at a time


class PooledBlocks:
    """A pool of `size` blocks. `rows[i]` has the numbers of the blocks that row i holds, in the
    order of its positions. Blocks are numbered from 1; number 0 stands for none.

    Rows that begin alike hold the blocks of that beginning together. Before a row writes to such a
    block, :meth:`own` replaces it.
    """

    def __init__(self, rows: int, size: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.changed: set[int] = set()  # rows that got or lost blocks; the user clears it
        self._holders = [0]
        self._free: list[int] = []
        self.size = 0
        self.grow(size)

    def grow(self, count: int) -> None:
        """Add `count` blocks."""
        new = range(self.size + 1, self.size + count + 1)
        self._free[:0] = reversed(new)  # the last one is taken next
        self._holders += [0] * count
        self.size += count

    @property
    def free(self) -> int:
        """Blocks that no row holds."""
        return len(self._free)

    def needed(self, row: int, first: int, last: int) -> int:
        """Blocks that :meth:`own` takes."""
        held = self.rows[row]
        shared = sum(self._holders[block] > 1 for block in held[first:last])
        return shared + max(last - len(held), 0)

    def own(self, row: int, first: int, last: int) -> list[tuple[int, int]]:
        """Make `row` hold `last` blocks, and be the only one that holds those from `first` on.
        Returns the shared blocks that were replaced: (old number, new number) each."""
        held, replaced = self.rows[row], []
        if self.needed(row, first, last):
            self.changed.add(row)
        for place in range(first, min(last, len(held))):
            if self._holders[old := held[place]] > 1:
                self._holders[old] -= 1
                held[place] = self._take()
                replaced.append((old, held[place]))
        held += [self._take() for _ in range(len(held), last)]
        return replaced

    def share(self, row: int, other: int, count: int) -> None:
        """Make `other` hold the first `count` blocks of `row`, and nothing else."""
        shared = self.rows[row][:count]
        for block in shared:
            self._holders[block] += 1
        self.cut(other, 0)
        self.rows[other] += shared
        self.changed.add(other)

    def cut(self, row: int, count: int) -> None:
        """Make `row` hold its first `count` blocks at most."""
        held = self.rows[row]
        if len(held) > count:
            self.changed.add(row)
        for block in reversed(held[count:]):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)
        del held[count:]

    def _take(self) -> int:
        block = self._free.pop()
        self._holders[block] = 1
        return block
