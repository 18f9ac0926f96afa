"""Graphs of padded rows for a CPU, for models that attend by themselves.

One graph takes any number of rows, any width and any context, so there are at most four of a model
(one row or several, one token or several: torch compiles these apart).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.export import Dim

from specdec_core.models.compiled.packages import Packages
from specdec_core.models.compiled.padded.sized import Graphs, Inputs

# The attended part of the cache is rounded up to a multiple of this.
_BLOCK = 16


class PackagedPadded(Graphs):
    """Graphs from `packages` for a cache of `positions`."""

    def __init__(self, packages: Packages, positions: int) -> None:
        self._packages, self._positions = packages, positions
        self._opened: dict[tuple[bool, bool], Callable[[list[Tensor]], Sequence[Tensor]]] = {}

    def end(self, end: int, positions: int) -> int:
        return min(-(-end // _BLOCK) * _BLOCK, positions - 1)

    def run(self, inputs: Inputs) -> Sequence[Tensor]:
        feed, sees, columns, keys, values = inputs
        rows, _, width = feed.shape
        kind = rows > 1, width > 2
        if kind not in self._opened:
            name = f"{'rows' if kind[0] else 'row'}-{'tokens' if kind[1] else 'token'}"
            self._opened[kind] = self._packages.open(name, inputs, self._shapes(kind, inputs))
        return self._opened[kind]([feed, *sees, columns, *keys, *values])

    def _shapes(self, kind: tuple[bool, bool], inputs: Inputs) -> Sequence[object]:
        several_rows, several_tokens = kind
        _, sees, _, keys, values = inputs
        rows = Dim("rows", min=2, max=4096) if several_rows else Dim.STATIC
        width = Dim("width", min=3, max=self._positions) if several_tokens else Dim.STATIC
        tokens = width - 1 if several_tokens else Dim.STATIC
        nodes = Dim("nodes", min=3, max=1 << 20)
        end = Dim("end", min=2, max=self._positions - 1)
        return (
            {0: rows, 2: width},
            [{0: rows, 1: tokens, 2: nodes}] * len(sees),
            {0: end},
            [{0: rows}] * len(keys),
            [{0: rows}] * len(values),
        )
