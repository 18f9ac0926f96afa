"""Graphs for a GPU: one for each size that occurs, replayed from CUDA graphs.

Launching a forward's many small kernels takes longer than running them; a CUDA graph launches them
all at once, but has fixed sizes and fixed memory. So sizes come in powers of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_core.models.compiled.graphs import CannotCompile, first_line
from specdec_core.models.compiled.padded.sized import Graphs, Inputs
from specdec_core.models.compiled.padded.step import PaddedStep

_LEAST_END = 128


class Captured(Graphs):
    """The step, compiled for each size when it is first met."""

    def __init__(self, step: PaddedStep) -> None:
        self._step = torch.compile(step, mode="reduce-overhead", fullgraph=True, dynamic=False)
        self._fixed: set[int] = set()
        # Each size is compiled separately, and torch would give up after a few.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 1024)

    def width(self, width: int) -> int:
        return _power(width)

    def cover(self, rows: Sequence[int], slots: int) -> tuple[int, int]:
        count = min(_power(max(rows) + 1 - min(rows)), slots)
        return min(min(rows), slots - count), count

    def end(self, end: int, positions: int) -> int:
        return min(max(_power(end), _LEAST_END), positions - 1)

    def run(self, inputs: Inputs) -> Sequence[Tensor]:
        feed, sees, columns, keys, values = inputs
        for store in (*keys, *values):
            if id(store) not in self._fixed:
                # The cache stays where it is, so a graph may write to it in place.
                torch._dynamo.mark_static_address(store)
                self._fixed.add(id(store))
        nodes = _power(max(mask.shape[2] for mask in sees))
        padded = [torch.nn.functional.pad(mask, (0, nodes - mask.shape[2])) for mask in sees]
        for mask, wide in zip(sees, padded, strict=True):
            # The last column masks everything after the tree.
            wide[..., mask.shape[2] :] = mask[..., -1:]
        torch.compiler.cudagraph_mark_step_begin()
        try:
            outputs = self._step(feed, padded, columns, keys, values)
        except Exception as error:  # of any of torch's compilers; eager forwards do without them
            raise CannotCompile(f"{type(error).__name__}: {first_line(error)}") from error
        # The next replay writes to the same memory.
        return [output.clone() for output in outputs]


def _power(count: int) -> int:
    """The least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()
