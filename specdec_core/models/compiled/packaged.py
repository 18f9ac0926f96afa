"""The graph of packed rows for a CPU: one graph, for any number of everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_core.models.cache import SlotCache
from specdec_core.models.compiled.packages import Packages
from specdec_core.models.compiled.step import example
from specdec_core.models.row_attention.plans import SeenPlaces

_CPU = torch.device("cpu")
_EACH = 16  # tokens of a forward up to which there is no padding
_ALL_WANTED = 64  # tokens of a step of rounds alone
_WARM = 256  # tokens of the widest forward that is run before the first request


class PackagedPacked:
    """The graph from `packages`, for a `cache` of any size.

    For each number of rows that a matrix product has not had yet, oneDNN makes a kernel, which
    takes as long as the forward. So forwards are padded to a few numbers of tokens, and these are
    run once beforehand, unless the project's operator does all products. Padding is written after
    the last row's tokens and repeats its last one; the row's next tokens replace it.
    """

    def __init__(self, packages: Packages, cache: SlotCache) -> None:
        self._packages, self._cache = packages, cache
        self._any_width = packages.any_width
        self._graph: Callable[[list[Tensor]], Sequence[Tensor]] | None = None
        layers = cache.held()
        self._keys = [layer.keys for layer in layers]
        self._values = [layer.values for layer in layers]
        self._features = [] if cache.features is None else [cache.features.tensor]

    @torch.inference_mode(False)  # torch.export takes no other tensors
    def prepare(self, kinds: int) -> None:
        """Compile or load it. Raises :class:`CannotCompile`."""
        inputs, shapes = example(self._keys, self._values, self._features, kinds)
        self._graph = self._packages.open("packed", inputs, shapes)

    def warm_up(self, kinds: int, agree: Callable[[bool], bool]) -> None:
        """Make the kernels for rounds, which want all logits, and for prompts. For `agree` see
        :class:`~specdec_core.models.eager.EagerRunner`."""
        self._any_width = agree(self._any_width)
        size = 1
        while size <= min(_WARM, self._cache.positions):
            feed = torch.zeros((4, size), dtype=torch.long)
            wanted = torch.zeros(size if size <= _ALL_WANTED else 1, dtype=torch.long)
            sees = [torch.tensor([[0, 0, 1, 0, 0]] * size, dtype=torch.int32)] * kinds
            nodes = [torch.zeros(1, dtype=torch.int32)] * kinds
            self._run(feed, wanted, sees, nodes)
            size = _size(size + 1)

    def run(
        self,
        feed: Sequence[Sequence[int]],
        wanted: Sequence[int],
        seen: Sequence[SeenPlaces],
    ) -> Sequence[Tensor]:
        """The step's outputs for its `feed`, the tokens `wanted` (at least one) and what each kind
        of layers has `seen`; see :class:`PackedStep`. The cache changes in place."""
        tokens, nodes = zip(*(plan.tables(_CPU) for plan in seen), strict=True)
        count, asked = len(feed[0]), len(wanted)
        more = self._size(count) - count
        row, end = feed[1][-1], feed[2][-1] + 1
        if more and end + more <= self._cache.positions:
            self._cache.claim([row], [end + more - self._cache.lengths[row]])
            places = [*feed[2], *range(end, end + more)]
            feed = [places if own is feed[2] else [*own, *[own[-1]] * more] for own in feed]
            tokens = tuple(torch.cat([own, own[-1:].expand(more, -1)]) for own in tokens)
        padded = [*wanted, *[wanted[-1]] * (self._size(asked) - asked)]
        outputs = self._run(torch.tensor(feed), torch.tensor(padded), list(tokens), list(nodes))
        return [output[:asked] for output in outputs]

    def _size(self, count: int) -> int:
        return count if self._any_width else _size(count)

    def _run(
        self, feed: Tensor, wanted: Tensor, tokens: list[Tensor], nodes: list[Tensor]
    ) -> Sequence[Tensor]:
        assert self._graph is not None, "prepare comes first"
        stores = *self._keys, *self._values, *self._features
        return self._graph([feed, wanted, *tokens, *nodes, *stores])


def _size(count: int) -> int:
    """The number of tokens that `count` are padded to: by a quarter at most."""
    step = 1 if count <= _EACH else 4 if count <= _ALL_WANTED else 16 if count <= _WARM else 32
    return -(-count // step) * step
