"""CUDA graphs of packed rows: all kernels of a forward, launched at once.

Launching a forward's many small kernels one by one takes longer than running them. A captured graph
has fixed sizes and fixed memory. So forwards are padded to some numbers of tokens, and each of
these is captured when it is first met; rows, trees and contexts are numbers in the graph's input.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from specdec_core.models.cache import PooledCache
from specdec_core.models.compiled.failures import CannotCompile, first_line
from specdec_core.models.compiled.step import PackedStep, example
from specdec_core.models.row_attention.plans import SeenPlaces
from specdec_core.models.runner import PREFILL_CHUNK

log = logging.getLogger(__name__)

_WARM_UPS = 2  # what kernels allocate and compile at their first calls is not captured
_STEP = 64  # tokens: fewer come in powers of two, more in multiples
_LEAST = 2  # torch's compiler would compile a single token apart
_LEAST_WANTED = 16  # of more than _STEP tokens
_LEAST_NODES = 64
_AS_THEY_ARE = "capturing kernels as they are: %s"

Step = Callable[..., Sequence[Tensor]]
Sizes = tuple[int, int, int, int]  # of tokens, those wanted and nodes; kinds of layers
FlatStep = Callable[[Tensor, Sizes], Sequence[Tensor]]

# Fused steps, for all runners of a model in this process.
_FUSED: WeakKeyDictionary[nn.Module, dict[Hashable, Step]] = WeakKeyDictionary()


class Captured:
    """The CUDA graphs of one step on `device`. :meth:`run` takes the step each time: kept
    here, it would be a reference cycle, and keep the graphs and the cache of a dropped runner."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Sizes, tuple[torch.cuda.CUDAGraph, Tensor, Sequence[Tensor]]] = {}
        self._pool: Any = None  # of their memory; results are copied, so they may share it

    def run(self, step: FlatStep, flat: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        """The step's outputs for `flat`, which may be on any device; valid until the next run.
        There is a graph for each `sizes`. Raises :class:`CannotCompile`."""
        with torch.cuda.device(self._device):
            if sizes not in self._graphs:
                try:
                    self._graphs[sizes] = self._capture(step, flat, sizes)
                except Exception as error:  # whatever a model does that a graph cannot
                    reason = f"{type(error).__name__}: {first_line(error)}"
                    raise CannotCompile(reason) from error
            graph, place, outputs = self._graphs[sizes]
            place.copy_(flat, non_blocking=True)
            graph.replay()
        return outputs

    def _capture(
        self, step: FlatStep, flat: Tensor, sizes: Sizes
    ) -> tuple[torch.cuda.CUDAGraph, Tensor, Sequence[Tensor]]:
        place = flat.to(self._device, copy=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                step(place, sizes)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"):
            outputs = step(place, sizes)
        self._pool = graph.pool()
        return graph, place, outputs


class CapturedPacked:
    """The `step`, captured for the `cache` of one runner, and anew when its pool has grown. Of a
    `shared` model other processes run their part at the same time.

    Padding is written to the pool's first block, which no row holds, and sees nothing."""

    def __init__(self, step: PackedStep, cache: PooledCache, shared: bool = False) -> None:
        self._eager, self._cache, self._shared = step, cache, shared
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
        self._captured = Captured(self._cache.table.device)

    def warm_up(self, kinds: int, agree: Callable[[bool], bool]) -> None:
        """Capture the graphs of chains, with fused kernels where torch's compiler can make them,
        as all processes of a shared model `agree`. Raises :class:`CannotCompile`."""
        traced = True
        try:
            self._step = fused(self._eager, *self._stores, self._cache.table, kinds)
        except Exception as error:  # of any of torch's compilers; graphs do without them
            traced = False
            log.warning(_AS_THEY_ARE, first_line(error))
        if agree(traced):
            try:
                return self._capture(kinds)
            except Exception as error:  # the same
                if self._shared:  # other processes may wait in an exchange, not for a vote
                    raise
                log.warning(_AS_THEY_ARE, first_line(error))
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
        seen: Sequence[SeenPlaces],
    ) -> Sequence[Tensor]:
        """See :meth:`PackagedPacked.run`. Raises :class:`CannotCompile`."""
        if self._version != self._cache.version:
            self._renew()
        n = _size(len(feed[0]))
        m = n if n <= _STEP else _power_of_two(max(len(wanted), _LEAST_WANTED))
        k = _power_of_two(max(_LEAST_NODES, *(len(plan.nodes) for plan in seen)))
        # One copy to the device, not one for each.
        flat: list[int] = []
        for own in feed:
            flat += _padded(own, n)
        flat += _padded(wanted, m)
        for plan in seen:
            flat += _padded(plan.tokens, 5 * n)
        for plan in seen:
            flat += _padded(plan.nodes, k)
        numbers = torch.tensor(flat, dtype=torch.int32)
        outputs = self._captured.run(self._unpacked, numbers, (n, m, k, len(seen)))
        # The next run writes to the same memory.
        return [output[: len(wanted)].clone() for output in outputs]

    def _unpacked(self, flat: Tensor, sizes: Sizes) -> Sequence[Tensor]:
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
    return _power_of_two(max(count, _LEAST)) if count <= _STEP else -(-count // _STEP) * _STEP


def _padded(numbers: Sequence[int], size: int) -> list[int]:
    return [*numbers, *[0] * (size - len(numbers))]


def _power_of_two(count: int) -> int:
    """The least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


@torch.inference_mode(False)  # torch.export takes no other tensors
def fused(
    step: PackedStep,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    features: Sequence[Tensor],
    blocks: Tensor,
    kinds: int,
) -> Step:
    """`step` for any numbers of tokens, in caches like these, with its many small kernels joined
    into few. Compiled when it is first called, which takes up to a minute, less where torch has
    kept what it compiled before.

    Raises any of torch's errors where the step cannot be traced.
    """
    known = _FUSED.setdefault(step.model, {})
    facts = kinds, step.last_position, step.vocab_size, keys[0].dtype, len(features), step.draft
    if facts not in known:
        log.warning("compiling kernels of %s", step.model.config.name_or_path)
        inputs, shapes = example(keys, values, features, kinds, blocks)
        with torch.no_grad():
            program = torch.export.export(step, inputs, dynamic_shapes=shapes, strict=False)
        compiled: Any = torch.compile(program.module(), dynamic=True, fullgraph=True)
        known[facts] = compiled
    return known[facts]
