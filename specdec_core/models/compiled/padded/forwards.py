"""Forwards of padded rows by graphs."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from specdec_core.models.compiled.graphs import Forwards
from specdec_core.models.compiled.padded.sized import Graphs
from specdec_core.models.eager import EagerRunner
from specdec_core.models.runner import Batch, Output, PaddedOutput, logits_chunk


class PaddedForwards(Forwards):
    """Forwards by `graphs`, which compute the logits of all tokens."""

    mixes = False

    def __init__(self, eager: EagerRunner, graphs: Graphs) -> None:
        self._eager, self._graphs, self._cache = eager, graphs, eager.cache
        self.prefill_chunk = logits_chunk(eager.vocab_size)
        columns = torch.arange(self._cache.positions, device=eager.device)
        self._columns = cache(lambda end: columns[:end])
        self._stores: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}

    def prepare(self) -> None:
        for count in range(1, min(self._cache.slots, 2) + 1):
            for width in (1, 2):
                self.run(Batch(range(count), [[0] * width] * count), hidden=False)
                for row in range(count):
                    self._cache.truncate(row, 0)

    def run(self, batch: Batch, hidden: bool) -> Output:
        rows, tokens, lengths = list(batch.rows), batch.tokens, self._cache.lengths
        width = self._graphs.width(max(map(len, tokens)))
        first, count = self._graphs.cover(rows, self._cache.slots)
        end = max(lengths[row] for row in rows) + width
        # Graphs leave a slot's last position free.
        if max(lengths[first : first + count]) + width >= self._cache.positions:
            return self._run_eagerly(batch, hidden)
        self._cache.claim(range(first, first + count), [width] * count)
        slices = self._eager.topologies.slices([len(row) for row in tokens], width, batch.parents)
        # Rows in between are fed padding, which lands after their text.
        feed = [
            [[length, *[0] * width], [length, *[0] * width]]
            for length in lengths[first : first + count]
        ]
        begins = zip(rows, tokens, slices.first, slices.depth_rows(), strict=True)
        for row, new, begun, depths in begins:
            length = lengths[row]
            padding = [0] * (width - len(new))
            feed[row - first] = [[length, *new, *padding], [length - begun, *depths]]
        places = None if rows == list(range(first, first + count)) else [r - first for r in rows]
        windows = self._eager.windows.values()
        inputs = (
            torch.tensor(feed, device=self._eager.device),
            [self._sees(slices.sees(window), places, count) for window in windows],
            self._columns(self._graphs.end(end, self._cache.positions)),
            *self._stored(first, count),
        )
        outputs = self._graphs.run(inputs)
        logits, chosen, read, *sure = (o if places is None else o[places] for o in outputs)
        self._cache.append(rows, map(len, tokens))
        confidence = sure[0] if sure else None
        return PaddedOutput(batch, logits, read if hidden else None, chosen, confidence)

    def _run_eagerly(self, batch: Batch, hidden: bool) -> Output:
        """Where padding has no room in one of the rows that a graph covers."""
        self._eager.watch_hidden(hidden)
        try:
            return self._eager._forward(batch)
        finally:
            self._eager.watch_hidden(False)

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
            rows, layers = slice(first, first + count), self._cache.held()
            with torch.inference_mode(False):  # torch.compile takes no other views
                keys = [layer.keys[rows] for layer in layers]
                values = [layer.values[rows] for layer in layers]
            stores = keys, values
            self._stores[first, count] = stores
        return stores
