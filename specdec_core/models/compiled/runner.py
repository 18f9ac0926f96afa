"""Forwards as compiled graphs over the slot cache."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from specdec_core.models.cache import PooledCache
from specdec_core.models.compiled.graphs import CannotCompile, Forwards
from specdec_core.models.compiled.packages import Packages
from specdec_core.models.compiled.packed.captured import CapturedPacked
from specdec_core.models.compiled.packed.forwards import PackedForwards
from specdec_core.models.compiled.packed.packaged import PackagedPacked
from specdec_core.models.compiled.packed.step import PackedStep
from specdec_core.models.eager import EagerRunner
from specdec_core.models.local_runner import LocalRunner
from specdec_core.models.runner import Batch, Output


class CompiledRunner(LocalRunner):
    """Forwards are graphs over the cache of an `eager` runner: on a CPU compiled ahead of time and
    kept on disk, on a GPU captured as CUDA graphs. Where the model cannot be compiled, the eager
    runner takes over after one warning.

    `weights` is the digest of the model's weights. The graphs of a `draft` say how sure it is, too.
    """

    def __init__(self, eager: EagerRunner, weights: str, draft: bool = False) -> None:
        super().__init__()
        self._eager = eager
        self.device, self.vocab_size, self.known = eager.device, eager.vocab_size, eager.known
        self.max_length, self.feature_layers = eager.max_length, eager.feature_layers
        self._watched = False
        eager.prepare()
        self.cache = eager.cache
        self._forwards: Forwards | None = None
        with torch.inference_mode():
            try:
                self._forwards = _forwards(eager, weights, draft)
                self.prefill_chunk = self._forwards.prefill_chunk
                self._forwards.prepare()
            except CannotCompile as reason:
                self._give_up(reason)

    @property
    def mixes(self) -> bool:  # type: ignore[override]
        return (self._forwards or self._eager).mixes

    def expect(self, parents: Sequence[int]) -> None:
        self._eager.expect(parents)

    def watch_hidden(self, wanted: bool) -> None:
        self._watched = wanted
        if self._forwards is None:
            self._eager.watch_hidden(wanted)

    def _forward(self, batch: Batch) -> Output:
        if self._forwards is not None:
            try:
                return self._forwards.run(batch, hidden=self._watched)
            except CannotCompile as reason:
                self._give_up(reason)
        return self._eager._forward(batch)

    def _give_up(self, reason: CannotCompile) -> None:
        warnings.warn(f"running without compiled graphs: {reason}", stacklevel=3)
        self._forwards = None
        self._eager.watch_hidden(self._watched)


def _forwards(eager: EagerRunner, weights: str, draft: bool) -> Forwards:
    """The way to run graphs of the eager runner's model. Raises :class:`CannotCompile` for a model
    whose rows have to be padded."""
    if not (eager.packs and eager.compact):
        raise CannotCompile("graphs are of packed rows, and this model's have to be padded")
    model, size, last = eager.model, eager.vocab_size, eager.last_position
    step = PackedStep(
        model, list(eager.windows), last, size, eager.keeps_logits, eager.layer_inputs, draft
    )
    if isinstance(eager.cache, PooledCache):
        return PackedForwards(eager, CapturedPacked(step, eager.cache))
    packages = Packages(
        step, model.config, [model.dtype, weights, last, size, eager.feature_layers, draft]
    )
    return PackedForwards(eager, PackagedPacked(packages, eager.cache))
