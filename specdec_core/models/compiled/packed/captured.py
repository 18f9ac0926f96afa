"""Graphs of packed rows for a GPU: one for each of some numbers of tokens, whatever rows, trees and
contexts they are of."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_core.models.cache import PooledCache
from specdec_core.models.compiled.capture import Captured, power_of_two
from specdec_core.models.compiled.graphs import first_line
from specdec_core.models.compiled.packed.fused import Step, fused
from specdec_core.models.compiled.packed.step import PackedStep
from specdec_core.models.row_attention import SeenPlaces
from specdec_core.models.runner import PREFILL_CHUNK

log = logging.getLogger(__name__)

_STEP = 64  # tokens: fewer come in powers of two, more in multiples
_LEAST = 2  # torch's compiler would compile a single token apart
_LEAST_WANTED = 16  # of more than _STEP tokens
_LEAST_NODES = 64


class CapturedPacked:
    """The `step`, captured for the `cache` of one runner, and anew when its pool has grown.

    Padding is written to the pool's first block, which holds no text, and sees nothing."""

    def __init__(self, step: PackedStep, cache: PooledCache) -> None:
        self._eager, self._cache = step, cache
        self._step: Step = step
        self._renew()

    def _renew(self) -> None:
        """Begin without graphs, in the cache's tensors as they are now."""
        layers, features = self._cache.held(), self._cache.features
        self._stores = (
            [layer.keys for layer in layers],
            [layer.values for layer in layers],
            [] if features is None else [features.tensor],
        )
        self._version = self._cache.version
        self._captured = Captured(self._unpacked, self._cache.table.device)

    def prepare(self, kinds: int) -> None:
        """Capture the graphs of chains, with fused kernels where torch's compiler can make them."""
        try:
            self._step = fused(self._eager, *self._stores, self._cache.table, kinds)
            self._capture(kinds)
        except Exception as error:  # of any of torch's compilers; graphs do without them
            log.warning("capturing kernels as they are: %s", first_line(error))
            self._step = self._eager
            self._renew()
            self._capture(kinds)

    def _capture(self, kinds: int) -> None:
        size = _LEAST
        while size <= PREFILL_CHUNK:
            self.run([[0] * size] * 4, [0], [SeenPlaces([], None)] * kinds)
            size += min(size, _STEP)

    def run(
        self,
        feed: Sequence[Sequence[int]],
        wanted: Sequence[int],
        plans: Sequence[SeenPlaces],
    ) -> Sequence[Tensor]:
        if self._version != self._cache.version:
            self._renew()
        n = _size(len(feed[0]))
        m = n if n <= _STEP else power_of_two(max(len(wanted), _LEAST_WANTED))
        k = power_of_two(max(_LEAST_NODES, *(len(plan.nodes) for plan in plans)))
        # One copy to the device, not one for each.
        flat: list[int] = []
        for own in feed:
            flat += _padded(own, n)
        flat += _padded(wanted, m)
        for plan in plans:
            flat += _padded(plan.tokens, 5 * n)
        for plan in plans:
            flat += _padded(plan.nodes, k)
        inputs = [torch.tensor(flat, dtype=torch.int32)]
        outputs = self._captured.run(inputs, (n, m, k, len(plans)))
        # The next run writes to the same memory.
        return [output[: len(wanted)].clone() for output in outputs]

    def _unpacked(self, flat: Tensor, sizes: tuple[int, int, int, int]) -> Sequence[Tensor]:
        n, m, k, kinds = sizes
        feed, wanted, *rest = flat.split([4 * n, m, *[5 * n] * kinds, *[k] * kinds])
        return self._step(
            feed.view(4, n).long(),
            wanted.long(),
            [own.view(n, 5) for own in rest[:kinds]],
            list(rest[kinds:]),
            *self._stores,
            self._cache.table,
        )


def _size(count: int) -> int:
    """The number of tokens that `count` are padded to."""
    return power_of_two(max(count, _LEAST)) if count <= _STEP else -(-count // _STEP) * _STEP


def _padded(numbers: Sequence[int], size: int) -> list[int]:
    return [*numbers, *[0] * (size - len(numbers))]
