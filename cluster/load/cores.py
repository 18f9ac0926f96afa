"""The CPU cores that a benchmark divides between engines and the load client."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from specdec_core.base.errors import UserError


@dataclass(frozen=True)
class Cores:
    """The CPU cores of a benchmark: for the engine's compute threads, and for the load client. HTTP
    and schedulers run on any core, because an HTTP thread in the engine's process must not wait for
    a core."""

    engine: tuple[int, ...] = ()
    client: tuple[int, ...] = ()

    @classmethod
    def divide(cls, threads: int) -> Self:
        """The first `threads` cores that this process may use for the engine, the rest, if there
        are any, for the client. Raises :class:`UserError` where there are too few."""
        usable = sorted(os.sched_getaffinity(0))
        if threads > len(usable):
            raise UserError(f"runner.threads {threads}: this process may use {len(usable)} cores")
        return cls(tuple(usable[:threads]), tuple(usable[threads:] or usable))

    @property
    def sentence(self) -> str:
        """The use of the cores, for reports."""
        engine, client = (", ".join(map(str, cores)) for cores in (self.engine, self.client))
        return (
            f"compute threads of every engine on core {engine}, the load client on core {client},"
            " HTTP and schedulers on any"
        )


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """This thread runs on these cores during the block; on any where there are none given."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
