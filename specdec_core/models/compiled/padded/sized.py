"""The interface of graphs of padded rows: the sizes they come in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

# feed, sees, columns, keys, values: see :class:`PaddedStep`.
Inputs = tuple[Tensor, list[Tensor], Tensor, list[Tensor], list[Tensor]]


class Graphs(ABC):
    """The compiled forms of a step, and the sizes they come in."""

    def width(self, width: int) -> int:
        """Tokens a row that a forward of `width` is padded to."""
        return width

    def cover(self, rows: Sequence[int], slots: int) -> tuple[int, int]:
        """The consecutive rows that a forward of `rows` runs on: the first, and how many."""
        first = min(rows)
        return first, max(rows) + 1 - first

    @abstractmethod
    def end(self, end: int, positions: int) -> int:
        """How many of `positions` to attend to, where `end` are in use."""

    @abstractmethod
    def run(self, inputs: Inputs) -> Sequence[Tensor]:
        """The step's outputs; what the cache holds changes in place. Raises
        :class:`CannotCompile`."""
