"""What the ways to run a model as compiled graphs have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

from specdec_core.models.runner import Batch, Output


class CannotCompile(Exception):
    """Why there is no graph, in one line."""


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return next((line for line in str(error).splitlines() if line.strip()), "no reason given")


class Forwards(ABC):
    """Forwards of a model by graphs, over the slot cache of its eager runner."""

    prefill_chunk: int  # tokens of a row in one forward of a prompt
    mixes: bool  # see ModelRunner

    @abstractmethod
    def run(self, batch: Batch, hidden: bool) -> Output:
        """The output for a batch, with the hidden states if these are wanted, whose tokens are
        appended to the cache. Raises :class:`CannotCompile`."""

    @abstractmethod
    def prepare(self) -> None:
        """Make the graphs of a chain before the first request comes. Raises
        :class:`CannotCompile`."""
