"""The graph of packed rows for a CPU: one, for any number of everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_core.models.cache import SlotCache
from specdec_core.models.compiled.packages import Packages
from specdec_core.models.compiled.packed.example import example
from specdec_core.models.row_attention import SeenPlaces

_CPU = torch.device("cpu")


class PackagedPacked:
    """The graph from `packages`, for a `cache` of any size."""

    def __init__(self, packages: Packages, cache: SlotCache) -> None:
        self._packages = packages
        self._graph: Callable[[list[Tensor]], Sequence[Tensor]] | None = None
        layers = cache.held()
        self._keys = [layer.keys for layer in layers]
        self._values = [layer.values for layer in layers]
        self._features = [] if cache.features is None else [cache.features.tensor]

    @torch.inference_mode(False)  # torch.export takes no other tensors
    def prepare(self, kinds: int) -> None:
        """Compile or load it."""
        inputs, shapes = example(self._keys, self._values, self._features, kinds)
        self._graph = self._packages.open("packed", inputs, shapes)

    def run(
        self,
        feed: Sequence[Sequence[int]],
        wanted: Sequence[int],
        plans: Sequence[SeenPlaces],
        hidden: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        assert self._graph is not None, "prepare comes first"
        tokens, nodes = zip(*(plan.tables(_CPU) for plan in plans), strict=True)
        new = torch.tensor(feed), torch.tensor(wanted)
        stores = *self._keys, *self._values, *self._features
        logits, chosen, read = self._graph([*new, *tokens, *nodes, *stores])
        return logits, chosen, read if hidden else None
