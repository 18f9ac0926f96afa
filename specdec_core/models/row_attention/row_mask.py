"""What the rows of a packed forward see, in the place of a mask."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class RowPlan(Protocol):
    """What each token of a packed sequence sees of the cache."""

    def attend(
        self, module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        """Attention (1, tokens, heads, head size) of `query` (1, heads, tokens, head size) to the
        whole cache, `keys` and `values` (slots, key heads, positions, head size) or the blocks
        (1, key heads, all positions, head size); `options` are those of transformers' attention
        functions."""


class RowMask(Tensor):
    """A plan that models pass on as it is, because it is a mask to them. As a tensor it is empty;
    it has four dimensions, as transformers expects of masks that are ready."""

    plan: RowPlan

    @classmethod
    def empty(cls) -> RowMask:
        """One without a plan yet."""
        return torch.empty((1, 1, 0, 0)).as_subclass(cls)

    @classmethod
    def of(cls, plan: RowPlan) -> RowMask:
        """One for `plan`."""
        mask = cls.empty()
        mask.plan = plan
        return mask
