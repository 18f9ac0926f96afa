"""A :class:`ModelRunner` whose forwards are compiled graphs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_core.models.compiled.graphs import CannotCompile, Graphs
from specdec_core.models.compiled.packages import Packages
from specdec_core.models.compiled.static import Captured
from specdec_core.models.compiled.step import Step
from specdec_core.models.runner import PREFILL_CHUNK, ModelRunner

# Prefill makes logits that nobody reads; a chunk's shall not take more memory than this.
_MOST_LOGITS = 64 * 2**20


class CompiledRunner(ModelRunner):
    """Forwards are graphs: compiled ahead of time and kept on disk on a CPU, CUDA graphs of
    static shapes on a GPU. Where a model cannot be compiled it runs eagerly, after one warning.

    `weights` is the digest of the model's weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        max_length: int,
        vocab_size: int | None,
        weights: str,
    ) -> None:
        super().__init__(model, slots, max_length, vocab_size)
        self._prefill_chunk = max(1, min(PREFILL_CHUNK, _MOST_LOGITS // (4 * self.vocab_size)))
        step = Step(model, self._windows, self._last_position, self.vocab_size)
        positions = self.cache.positions
        self._graphs: Graphs | None = (
            Packages(step, weights, positions) if self.device.type == "cpu" else Captured(step)
        )
        columns = torch.arange(positions, device=self.device)
        self._columns = cache(lambda end: columns[:end])
        self._stores: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
        self._chosen: Tensor | None = None
        self._watched = False
        self._width = 1
        with torch.no_grad():
            super()._run([0], [[0]])  # the model makes the cache's layers
        self._prepare()

    def watch_hidden(self, wanted: bool) -> None:
        self._watched = wanted
        super().watch_hidden(wanted and self._graphs is None)
        self.hidden = None

    def widen(self, width: int) -> None:
        self._width = width

    @torch.inference_mode()
    def _prepare(self) -> None:
        """Have the graphs of a chain before the first request comes. What is written to the cache
        is overwritten."""
        for rows in range(1, min(self.cache.slots, 2) + 1):
            for width in (1, 2):
                self._run(range(rows), [[0] * width] * rows)

    @property
    def chosen(self) -> Tensor:
        return super().chosen if self._chosen is None else self._chosen

    def _run(
        self,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
        logits: bool = True,
    ) -> Tensor:
        if self._graphs is not None:
            try:
                return self._run_graph(self._graphs, list(rows), tokens, parents)
            except CannotCompile as reason:
                warnings.warn(f"running without compiled graphs: {reason}", stacklevel=2)
                self._graphs = self._chosen = None
                super().watch_hidden(self._watched)
        return super()._run(rows, tokens, parents, logits)

    def _run_graph(
        self,
        graphs: Graphs,
        rows: list[int],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None,
    ) -> Tensor:
        width = graphs.width(max(self._width, *map(len, tokens)))
        first, count = graphs.cover(rows, self.cache.slots)
        end = max(self.lengths[row] for row in rows) + width
        if end >= self.cache.positions:
            raise ValueError(f"{end} tokens do not fit in a slot of {self.cache.positions}")
        slices = self._topologies.slices([len(own) for own in tokens], width, parents)
        # Rows that happen to lie between are fed padding, which lands behind their text.
        feed = [
            [[length, *[0] * width], [length, *[0] * width]]
            for length in self.lengths[first : first + count]
        ]
        begins = zip(rows, tokens, slices.first, slices.depth_rows(), strict=True)
        for row, own, begun, depths in begins:
            length = self.lengths[row]
            padding = [0] * (width - len(own))
            feed[row - first] = [[length, *own, *padding], [length - begun, *depths]]
        places = None if rows == list(range(first, first + count)) else [r - first for r in rows]
        inputs = (
            torch.tensor(feed, device=self.device),
            [self._sees(slices.sees(window), places, count) for window in self._windows.values()],
            self._columns(graphs.end(end, self.cache.positions)),
            *self._stored(first, count),
        )
        logits, chosen, hidden = graphs.run(inputs)
        if places is not None:
            logits, chosen = logits[places], chosen[places]
            hidden = hidden[places] if self._watched else hidden
        fed = max(map(len, tokens))
        self._chosen = chosen if fed == width else chosen[:, :fed]
        self.hidden = hidden if self._watched else None
        return logits

    @staticmethod
    def _sees(own: Tensor, places: list[int] | None, count: int) -> Tensor:
        """The rows' slices where the graph's rows are."""
        if places is None:
            return own if own.is_contiguous() else own.contiguous()
        everyone = own.new_zeros((count, *own.shape[1:]))
        everyone[places] = own
        return everyone

    def _stored(self, first: int, count: int) -> tuple[list[Tensor], list[Tensor]]:
        """Every layer's keys and values of `count` rows."""
        found = self._stores.get((first, count))
        if found is None:
            rows, layers = slice(first, first + count), self.cache.held()
            with torch.inference_mode(False):  # torch.compile takes no other views
                keys = [layer.keys[rows] for layer in layers]
                values = [layer.values[rows] for layer in layers]
            found = keys, values
            self._stores[first, count] = found
        return found
