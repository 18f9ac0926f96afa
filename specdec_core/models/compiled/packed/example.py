"""What torch's compilers are shown of a step's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

_MOST = 1 << 20


def example(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    features: Sequence[Tensor],
    kinds: int,
    blocks: Tensor | None = None,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Inputs with several of everything for a model with so many `kinds` of layers and such stores,
    of a pool with `blocks`, and, as torch.export has them, the dimensions that vary: all but those
    of the cache's heads."""
    device, rows = keys[0].device, 2 if blocks is None else 1
    n, m, k = (Dim(name, min=2, max=_MOST) for name in ("tokens", "wanted", "nodes"))
    slots, positions = (Dim(name, min=2, max=_MOST) for name in ("slots", "positions"))
    sees = torch.tensor([[0, 0, 1, 0, 0]] * 3, dtype=torch.int32, device=device)
    # No tensor twice: a graph would take two inputs for one.
    inputs = (
        torch.arange(3, device=device) + torch.zeros((4, 1), dtype=torch.long, device=device),
        torch.tensor([0, 1], device=device),
        [sees.clone() for _ in range(kinds)],
        [torch.zeros(2, dtype=torch.int32, device=device) for _ in range(kinds)],
        *(
            [store.new_zeros((rows, store.shape[1], 8, store.shape[3])) for store in stores]
            for stores in (keys, values, features)
        ),
    )
    sizes = [{1: n}, {0: m}, [{0: n}] * kinds, [{0: k}] * kinds]
    varies = {0: slots, 2: positions} if blocks is None else {2: positions}
    sizes += [[varies] * len(stores) for stores in (keys, values, features)]
    if blocks is None:
        return inputs, tuple(sizes)
    slots, count = (Dim(name, min=2, max=_MOST) for name in ("slots", "blocks"))
    return (*inputs, blocks.new_zeros((2, 2))), (*sizes, {0: slots, 1: count})
