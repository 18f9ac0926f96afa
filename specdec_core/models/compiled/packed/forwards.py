"""Forwards of packed rows by one graph, in which the project's operator attends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.export import Dim

from specdec_core.models.compiled.graphs import Forwards
from specdec_core.models.compiled.packages import Packages
from specdec_core.models.eager import EagerRunner
from specdec_core.models.row_attention import PackedSequence, SeenPlaces
from specdec_core.models.runner import PREFILL_CHUNK, Batch, Output, PackedOutput

_MOST = 1 << 20


class PackedForwards(Forwards):
    """Forwards by the graph from `packages`: for any rows, tokens and trees, in a cache of any
    size."""

    prefill_chunk = PREFILL_CHUNK
    mixes = True

    def __init__(self, eager: EagerRunner, packages: Packages) -> None:
        self._eager, self._packages, self._cache = eager, packages, eager.cache
        self._graph: Callable[[list[Tensor]], Sequence[Tensor]] | None = None
        layers = self._cache.held()
        self._keys = [layer.keys for layer in layers]
        self._values = [layer.values for layer in layers]

    def prepare(self) -> None:
        self.run(Batch([0], [[0]]), hidden=False)
        self._cache.truncate(0, 0)

    def run(self, batch: Batch, hidden: bool) -> Output:
        counts = [len(row) for row in batch.tokens]
        window = self._cache.open_packed(batch.rows, counts)
        packed = PackedSequence.of(batch, window.ends, self._eager.topologies)
        ids, positions = torch.tensor(packed.tokens), torch.tensor(packed.positions)
        feed = torch.stack([ids, window.rows, window.positions, positions])
        wanted = torch.tensor(packed.wanted or [0])
        plans = [SeenPlaces(packed.rows, window) for window in self._eager.windows.values()]
        if self._graph is None:
            self._graph = self._open(len(plans))
        tokens, nodes = [plan.tokens for plan in plans], [plan.nodes for plan in plans]
        inputs = [feed, wanted, *tokens, *nodes, *self._keys, *self._values]
        outputs = self._graph(inputs)
        logits, chosen, read = (out[: len(packed.wanted)] for out in outputs)
        self._cache.append(batch.rows, counts)
        return PackedOutput(batch.counts, logits, read if hidden else None, chosen)

    @torch.inference_mode(False)  # torch.export takes no other tensors
    def _open(self, kinds: int) -> Callable[[list[Tensor]], Sequence[Tensor]]:
        """The graph, compiled from an example with several of everything."""
        n, m, k = (Dim(name, min=2, max=_MOST) for name in ("tokens", "wanted", "nodes"))
        slots, positions = (Dim(name, min=2, max=_MOST) for name in ("slots", "positions"))
        sees = torch.tensor([[0, 0, 1, 0, 0]] * 3, dtype=torch.int32)
        # No tensor twice: a graph would take two inputs for one.
        examples = (
            torch.arange(3) + torch.zeros((4, 1), dtype=torch.long),
            torch.tensor([0, 1]),
            [sees.clone() for _ in range(kinds)],
            [torch.zeros(2, dtype=torch.int32) for _ in range(kinds)],
            *(
                [keys.new_zeros((2, keys.shape[1], 8, keys.shape[3])) for keys in stores]
                for stores in (self._keys, self._values)
            ),
        )
        sizes = [{0: slots, 2: positions}] * len(self._keys)
        shapes = ({1: n}, {0: m}, [{0: n}] * kinds, [{0: k}] * kinds, sizes, sizes)
        return self._packages.open("packed", examples, shapes)
