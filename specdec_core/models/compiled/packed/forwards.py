"""Forwards of packed rows by graphs, in which the project's operator attends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specdec_core.models.compiled.graphs import Forwards
from specdec_core.models.eager import EagerRunner
from specdec_core.models.row_attention import PackedSequence, SeenPlaces
from specdec_core.models.runner import PREFILL_CHUNK, Batch, Output, PackedOutput


class PackedGraphs(Protocol):
    """The compiled forms of a step over the cache of one runner."""

    def prepare(self, kinds: int) -> None:
        """Make the graphs before the first request comes, of a model with so many kinds of layers.
        Raises :class:`CannotCompile`."""

    def run(
        self,
        feed: Sequence[Sequence[int]],
        wanted: Sequence[int],
        plans: Sequence[SeenPlaces],
    ) -> Sequence[Tensor]:
        """The step's outputs for its `feed`, the tokens `wanted` (at least one) and what each kind
        of layers sees; see :class:`PackedStep`. What the cache holds changes in place. Raises
        :class:`CannotCompile`."""


class PackedForwards(Forwards):
    """Forwards by `graphs`: for any rows, tokens and trees."""

    prefill_chunk = PREFILL_CHUNK
    mixes = True

    def __init__(self, eager: EagerRunner, graphs: PackedGraphs) -> None:
        self._eager, self._graphs, self._cache = eager, graphs, eager.cache

    def prepare(self) -> None:
        self._graphs.prepare(len(self._eager.windows))

    def run(self, batch: Batch, hidden: bool) -> Output:
        counts = [len(row) for row in batch.tokens]
        window = self._cache.open_packed(batch.rows, counts)
        packed = PackedSequence.of(batch, window.ends, self._eager.topologies)
        feed = packed.tokens, window.rows, window.positions, packed.positions
        plans = [SeenPlaces(packed.rows, window) for window in self._eager.windows.values()]
        outputs = self._graphs.run(feed, packed.wanted or [0], plans)
        self._cache.append(batch.rows, counts)
        if not packed.wanted:
            outputs = [output[:0] for output in outputs]
        logits, chosen, read, *sure = outputs
        return PackedOutput(batch.counts, logits, read if hidden else None, chosen, *sure)
