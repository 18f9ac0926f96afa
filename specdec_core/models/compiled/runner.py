"""Forwards as compiled graphs over the slot cache."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from specdec_core.models.compiled.graphs import CannotCompile, Graphs
from specdec_core.models.compiled.packages import Packages
from specdec_core.models.compiled.static import Captured
from specdec_core.models.compiled.step import Step
from specdec_core.models.eager import EagerRunner
from specdec_core.models.local_runner import LocalRunner
from specdec_core.models.runner import Batch, Output, PaddedOutput, compiled_chunk


class CompiledRunner(LocalRunner):
    """Forwards are graphs over the cache of an `eager` runner: on a CPU compiled ahead of time and
    kept on disk, on a GPU CUDA graphs of static shapes. Where the model cannot be compiled, the
    eager runner takes over after one warning.

    `weights` is the digest of the model's weights.
    """

    def __init__(self, eager: EagerRunner, weights: str) -> None:
        super().__init__()
        self._eager, self.cache = eager, eager.cache
        self.device, self.vocab_size = eager.device, eager.vocab_size
        self.max_length = eager.max_length
        self.prefill_chunk = compiled_chunk(self.vocab_size)
        step = Step(eager.model, eager.windows, eager.last_position, self.vocab_size)
        positions = self.cache.positions
        self._graphs: Graphs | None = (
            Packages(step, weights, positions) if self.device.type == "cpu" else Captured(step)
        )
        columns = torch.arange(positions, device=self.device)
        self._columns = cache(lambda end: columns[:end])
        self._stores: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
        self._watched = False
        self._width = 1
        self._prepare()

    def expect(self, parents: Sequence[int]) -> None:
        self._eager.expect(parents)

    def watch_hidden(self, wanted: bool) -> None:
        self._watched = wanted
        self._eager.watch_hidden(wanted and self._graphs is None)

    def widen(self, width: int) -> None:
        self._width = width

    def _prepare(self) -> None:
        """Make the cache's layers, by a forward of the model, and the graphs of a chain before the
        first request comes."""
        with torch.no_grad():
            self._eager._forward(Batch([0], [[0]]))
        self.truncate(0, 0)
        with torch.inference_mode():
            for count in range(1, min(self.cache.slots, 2) + 1):
                for width in (1, 2):
                    self._forward(Batch(range(count), [[0] * width] * count))
                    for row in range(count):
                        self.truncate(row, 0)

    def _forward(self, batch: Batch) -> Output:
        if self._graphs is not None:
            try:
                return self._run_graph(self._graphs, batch)
            except CannotCompile as reason:
                warnings.warn(f"running without compiled graphs: {reason}", stacklevel=3)
                self._graphs = None
                self._eager.watch_hidden(self._watched)
        return self._eager._forward(batch)

    def _run_graph(self, graphs: Graphs, batch: Batch) -> Output:
        rows, tokens = list(batch.rows), batch.tokens
        width = graphs.width(max(self._width, *map(len, tokens)))
        first, count = graphs.cover(rows, self.cache.slots)
        end = max(self.lengths[row] for row in rows) + width
        if end >= self.cache.positions:
            raise ValueError(f"{end} tokens do not fit in a slot of {self.cache.positions}")
        slices = self._eager.topologies.slices([len(row) for row in tokens], width, batch.parents)
        # Rows in between are fed padding, which lands after their text.
        feed = [
            [[length, *[0] * width], [length, *[0] * width]]
            for length in self.lengths[first : first + count]
        ]
        begins = zip(rows, tokens, slices.first, slices.depth_rows(), strict=True)
        for row, new, begun, depths in begins:
            length = self.lengths[row]
            padding = [0] * (width - len(new))
            feed[row - first] = [[length, *new, *padding], [length - begun, *depths]]
        places = None if rows == list(range(first, first + count)) else [r - first for r in rows]
        windows = self._eager.windows.values()
        inputs = (
            torch.tensor(feed, device=self.device),
            [self._sees(slices.sees(window), places, count) for window in windows],
            self._columns(graphs.end(end, self.cache.positions)),
            *self._stored(first, count),
        )
        logits, chosen, hidden = graphs.run(inputs)
        if places is not None:
            logits, chosen = logits[places], chosen[places]
            hidden = hidden[places] if self._watched else hidden
        self.cache.append(rows, map(len, tokens))
        return PaddedOutput(batch, logits, hidden if self._watched else None, chosen)

    @staticmethod
    def _sees(slices: Tensor, places: list[int] | None, count: int) -> Tensor:
        """The slices of the batch's rows at the `places` of the graph's `count` rows."""
        if places is None:
            return slices.contiguous()
        padded = slices.new_zeros((count, *slices.shape[1:]))
        padded[places] = slices
        return padded

    def _stored(self, first: int, count: int) -> tuple[list[Tensor], list[Tensor]]:
        """Every layer's keys and values of `count` rows."""
        stores = self._stores.get((first, count))
        if stores is None:
            rows, layers = slice(first, first + count), self.cache.held()
            with torch.inference_mode(False):  # torch.compile takes no other views
                keys = [layer.keys[rows] for layer in layers]
                values = [layer.values[rows] for layer in layers]
            stores = keys, values
            self._stores[first, count] = stores
        return stores
