"""The interface of a compiled runner's graphs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

# feed, sees, columns, keys, values: see :meth:`specdec_core.models.compiled.step.Step.forward`.
Inputs = tuple[Tensor, list[Tensor], Tensor, list[Tensor], list[Tensor]]


class CannotCompile(Exception):
    """Why there is no graph, in one line."""


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return next((line for line in str(error).splitlines() if line.strip()), "no reason given")


class Graphs:
    """The compiled forms of a step, and the sizes they come in."""

    def width(self, width: int) -> int:
        """Tokens a row that a forward of `width` is padded to."""
        return width

    def cover(self, rows: Sequence[int], slots: int) -> tuple[int, int]:
        """The consecutive rows that a forward of `rows` runs on: the first, and how many."""
        first = min(rows)
        return first, max(rows) + 1 - first

    def end(self, end: int, positions: int) -> int:
        """How many of `positions` to attend to, where `end` are in use."""
        raise NotImplementedError

    def run(self, inputs: Inputs) -> Sequence[Tensor]:
        """The step's outputs; what the cache holds changes in place. Raises
        :class:`CannotCompile`."""
        raise NotImplementedError
