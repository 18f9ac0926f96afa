"""Which memory each part of a row is in.

A row of the cache is counted in blocks of :data:`BLOCK` positions. At first each block has memory
of its own, its *home*. A row that begins like another one takes the other's whole blocks instead of
a copy, and each such block has memory of its own again before it is written to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BLOCK = 64  # positions; a whole number of pages for most sizes of heads


@dataclass(frozen=True, slots=True)
class BlockRun:
    """`count` blocks of `row` from `block` on are in the memory of as many homes: those of the row
    `home_row` from `home_block` on."""

    row: int
    block: int
    home_row: int
    home_block: int
    count: int


class Blocks:
    """The blocks of `rows` rows of `count` blocks each."""

    def __init__(self, rows: int, count: int) -> None:
        self.count = count
        self._homes = [list(range(row * count, (row + 1) * count)) for row in range(rows)]
        self._holders = [1] * (rows * count)
        self._free: set[int] = set()  # homes in which there is no block

    @property
    def saved(self) -> int:
        """Blocks that are held in another's memory."""
        return len(self._free)

    def runs(self, row: int, first: int = 0) -> list[BlockRun]:
        """Where the row's blocks from `first` on are."""
        homes = enumerate(self._homes[row][first:], first)
        return list(self._joined((row, block, home) for block, home in homes))

    def share(self, row: int, other: int, count: int) -> tuple[list[BlockRun], list[BlockRun]]:
        """Let the first `count` blocks of `other` be those of `row`. What moved, and where blocks
        are now in no use: `home_row` and `home_block` of the latter alone have a meaning."""
        moved, unused = [], []
        for block in range(count):
            old, new = self._homes[other][block], self._homes[row][block]
            if old == new:
                continue
            self._holders[old] -= 1
            if not self._holders[old]:
                self._free.add(old)
                unused.append((other, block, old))
            self._homes[other][block] = new
            self._holders[new] += 1
            moved.append((other, block, new))
        return list(self._joined(moved)), list(self._joined(unused))

    def own(self, row: int, first: int, last: int) -> list[BlockRun]:
        """Make blocks [first, last) of `row` nobody else's. What moved."""
        moved = []
        for block in range(first, last):
            old = self._homes[row][block]
            if self._holders[old] == 1:
                continue
            self._holders[old] -= 1
            home = row * self.count + block
            # Of as many homes as blocks one is free when two blocks share one.
            home = home if home in self._free else next(iter(self._free))
            self._free.remove(home)
            self._homes[row][block], self._holders[home] = home, 1
            moved.append((row, block, home))
        return list(self._joined(moved))

    def _joined(self, places: Iterable[tuple[int, int, int]]) -> Iterable[BlockRun]:
        """Consecutive (row, block, home) in as few runs as there can be."""
        run: BlockRun | None = None
        for row, block, home in places:
            at = divmod(home, self.count)
            if run is not None and (row, block, *at) == (
                run.row,
                run.block + run.count,
                run.home_row,
                run.home_block + run.count,
            ):
                run = BlockRun(run.row, run.block, run.home_row, run.home_block, run.count + 1)
                continue
            if run is not None:
                yield run
            run = BlockRun(row, block, *at, 1)
        if run is not None:
            yield run


class PooledBlocks:
    """Blocks of a pool, which has `size` of them, that rows hold: `rows[i]` numbers those of row i
    in the order of its positions. They are numbered from 1; number 0 stands for none."""

    def __init__(self, rows: int, size: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.changed: set[int] = set()  # rows that got or left blocks, until somebody clears it
        self._holders = [0]
        self._free: list[int] = []
        self.size = 0
        self.grow(size)

    def grow(self, count: int) -> None:
        """Have so many blocks more."""
        new = range(self.size + 1, self.size + count + 1)
        self._free[:0] = reversed(new)  # the last one is taken next
        self._holders += [0] * count
        self.size += count

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def needed(self, row: int, first: int, last: int) -> int:
        """Blocks that :meth:`own` takes."""
        held = self.rows[row]
        shared = sum(self._holders[block] > 1 for block in held[first:last])
        return shared + max(last - len(held), 0)

    def own(self, row: int, first: int, last: int) -> list[tuple[int, int]]:
        """Have `row` hold its blocks up to `last` and those from `first` on alone. Of blocks that
        it held with others, which it had and which it has in its place."""
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

    def alone(self, row: int, first: int) -> list[tuple[int, int]]:
        """The blocks from `first` on that `row` alone holds: their places in it, and numbers."""
        held = enumerate(self.rows[row][first:], first)
        return [(place, block) for place, block in held if self._holders[block] == 1]

    def share(self, row: int, other: int, count: int) -> None:
        """Have `other` hold the first `count` blocks of `row`, and nothing else."""
        shared = self.rows[row][:count]
        for block in shared:
            self._holders[block] += 1
        self.cut(other, 0)
        self.rows[other] += shared
        self.changed.add(other)

    def cut(self, row: int, count: int) -> None:
        """Have `row` hold its first `count` blocks at most."""
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
