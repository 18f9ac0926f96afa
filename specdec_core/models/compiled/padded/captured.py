"""Graphs of padded rows for a GPU: one for each size that occurs; sizes come in powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_core.models.compiled.capture import Captured, power_of_two
from specdec_core.models.compiled.padded.sized import Graphs, Inputs
from specdec_core.models.compiled.padded.step import PaddedStep

_LEAST_END = 128


class CapturedPadded(Graphs):
    """The `step`, captured for each size when it is first met."""

    def __init__(self, step: PaddedStep, device: torch.device) -> None:
        self._step = step
        self._held: dict[tuple[int, int, int], tuple[Tensor, list[Tensor], list[Tensor]]] = {}
        self._captured = Captured(self._unpacked, device)

    def width(self, width: int) -> int:
        return power_of_two(width)

    def cover(self, rows: Sequence[int], slots: int) -> tuple[int, int]:
        count = min(power_of_two(max(rows) + 1 - min(rows)), slots)
        return min(min(rows), slots - count), count

    def end(self, end: int, positions: int) -> int:
        return min(max(power_of_two(end), _LEAST_END), positions - 1)

    def run(self, inputs: Inputs) -> Sequence[Tensor]:
        feed, sees, columns, keys, values = inputs
        nodes = power_of_two(max(mask.shape[2] for mask in sees))
        padded = [pad(mask, (0, nodes - mask.shape[2])) for mask in sees]
        for mask, wide in zip(sees, padded, strict=True):
            # The last column masks everything after the tree.
            wide[..., mask.shape[2] :] = mask[..., -1:]
        # A graph reads and writes the cache where it is, of the rows that begin there.
        kind = keys[0].data_ptr(), len(keys[0]), len(columns)
        self._held[kind] = columns, keys, values
        outputs = self._captured.run([feed, *padded], kind)
        # The next run writes to the same memory.
        return [output.clone() for output in outputs]

    def _unpacked(self, feed: Tensor, *rest: Any) -> Sequence[Tensor]:
        *sees, kind = rest
        outputs: Sequence[Tensor] = self._step(feed, sees, *self._held[kind])
        return outputs
