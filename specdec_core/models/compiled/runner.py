"""Forwards as compiled graphs over the slot cache."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from specdec_core.models.cache import PooledCache
from specdec_core.models.compiled.captured import CapturedPacked
from specdec_core.models.compiled.failures import CannotCompile
from specdec_core.models.compiled.packaged import PackagedPacked
from specdec_core.models.compiled.packages import Packages
from specdec_core.models.compiled.step import PackedStep
from specdec_core.models.eager import EagerRunner
from specdec_core.models.local_runner import LocalRunner
from specdec_core.models.row_attention.plans import SeenPlaces
from specdec_core.models.row_attention.sequence import PackedSequence
from specdec_core.models.runner import Batch, Output


class CompiledRunner(LocalRunner):
    """Forwards are graphs over the cache of an `eager` runner: on a CPU compiled ahead of time and
    kept on disk, on a GPU captured as CUDA graphs. Where the model cannot be compiled, the eager
    runner takes over after one warning; of a model that several processes share, in all of them, or
    :class:`CannotCompile` is raised: a process alone would exchange other tensors than the others.

    `weights` is the digest of the weights in this process. The graphs of a `draft` also return how
    sure it is.
    """

    def __init__(self, eager: EagerRunner, weights: str, draft: bool = False) -> None:
        super().__init__()
        self._eager, self._watched = eager, False
        self.device, self.vocab_size, self.known = eager.device, eager.vocab_size, eager.known
        self.max_length, self.feature_layers = eager.max_length, eager.feature_layers
        self.cache = eager.cache
        eager.forward(Batch([0], [[0]]))  # makes the cache's layers
        eager.truncate(0, 0)
        self._graphs: PackagedPacked | CapturedPacked | None = None
        with torch.inference_mode():
            try:
                self._graphs = _graphs(eager, weights, draft)
                self._graphs.warm_up(len(eager.windows), eager.agree)
            except CannotCompile as reason:
                self._give_up(reason, alone=self._graphs is not None)

    @property
    def mixes(self) -> bool:  # type: ignore[override]
        return self._graphs is not None or self._eager.mixes

    def expect(self, parents: Sequence[int]) -> None:
        self._eager.expect(parents)

    def watch_hidden(self, wanted: bool) -> None:
        self._watched = wanted
        if self._graphs is None:
            self._eager.watch_hidden(wanted)

    def _forward(self, batch: Batch) -> Output:
        if self._graphs is not None:
            try:
                return self._by_graph(self._graphs, batch)
            except CannotCompile as reason:
                self._give_up(reason, alone=True)
        return self._eager._forward(batch)

    def _by_graph(self, graphs: PackagedPacked | CapturedPacked, batch: Batch) -> Output:
        counts = [len(row) for row in batch.tokens]
        window = self.cache.open_window(batch.rows, counts)
        packed = PackedSequence.of(batch, window.ends, self._eager.topologies)
        feed = packed.tokens, window.rows, window.positions, packed.positions
        seen = [SeenPlaces(packed.rows, window) for window in self._eager.windows.values()]
        outputs = graphs.run(feed, packed.wanted or [0], seen)
        self.cache.append(batch.rows, counts)
        if not packed.wanted:
            outputs = [output[:0] for output in outputs]
        logits, chosen, hidden, *confidence = outputs
        return Output(batch.counts, logits, hidden if self._watched else None, chosen, *confidence)

    def _give_up(self, reason: CannotCompile, alone: bool) -> None:
        if alone and self._eager.shared:  # the group must be started again, not wait forever
            raise reason
        warnings.warn(f"running without compiled graphs: {reason}", stacklevel=3)
        self._graphs = None
        self._eager.watch_hidden(self._watched)


def _graphs(eager: EagerRunner, weights: str, draft: bool) -> PackagedPacked | CapturedPacked:
    """The graphs of the eager runner's model, not warm yet. Raises :class:`CannotCompile`, in all
    processes that share the model or in none."""
    graphs, reason = None, CannotCompile("another process that shares the model has no graphs")
    try:
        graphs = _prepared(eager, weights, draft)
    except CannotCompile as own:
        reason = own
    if not eager.agree(graphs is not None) or graphs is None:
        raise reason
    return graphs


def _prepared(eager: EagerRunner, weights: str, draft: bool) -> PackagedPacked | CapturedPacked:
    """Graphs that have not run yet. Raises :class:`CannotCompile`, where rows are not packed
    too."""
    if not eager.compact:
        raise CannotCompile("graphs are of packed rows, and this model's rows are run one by one")
    step, model = PackedStep(eager, draft), eager.model
    if isinstance(eager.cache, PooledCache):
        return CapturedPacked(step, eager.cache, eager.shared)
    sizes = eager.last_position, eager.vocab_size
    facts = [model.dtype, weights, *sizes, eager.feature_layers, draft]
    graphs = PackagedPacked(Packages(step, model.config, facts), eager.cache)
    graphs.prepare(len(eager.windows))
    return graphs
