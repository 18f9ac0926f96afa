"""CUDA graphs: a forward's many small kernels, launched all at once.

Launching them one by one takes longer than running them. A captured graph has fixed sizes and fixed
memory, so forwards are padded to sizes that come in steps, and each is captured when it is first
met.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_core.models.compiled.graphs import CannotCompile, first_line

_WARM_UPS = 2  # what kernels allocate and compile at their first calls is not captured


class Captured:
    """The graphs of `step`, which takes tensors of fixed sizes, on a GPU."""

    def __init__(self, step: Callable[..., Sequence[Tensor]], device: torch.device) -> None:
        self._step, self._device = step, device
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], list[Tensor]]] = {}
        self._pool: Any = None  # of their memory; results are copied, so they may share it

    def run(self, inputs: Sequence[Tensor], kind: Hashable = None) -> list[Tensor]:
        """The step's outputs for `inputs`, on any device, until the next run. Those of other sizes,
        or of another `kind`, get a graph of their own. Raises :class:`CannotCompile`."""
        key = (kind, *(tensor.shape for tensor in inputs))
        with torch.cuda.device(self._device):
            if key not in self._graphs:
                try:
                    self._graphs[key] = self._capture(inputs, kind)
                except Exception as error:  # whatever a model does that a graph cannot
                    reason = f"{type(error).__name__}: {first_line(error)}"
                    raise CannotCompile(reason) from error
            graph, places, outputs = self._graphs[key]
            for place, tensor in zip(places, inputs, strict=True):
                place.copy_(tensor, non_blocking=True)
            graph.replay()
        return outputs

    def _capture(
        self, inputs: Sequence[Tensor], kind: Hashable
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor], list[Tensor]]:
        places = [tensor.to(self._device, copy=True) for tensor in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._step(*places, kind)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"):
            outputs = self._step(*places, kind)
        self._pool = graph.pool()
        return graph, places, list(outputs)


def power_of_two(count: int) -> int:
    """The least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()
