"""What runners in this process have in common: rows in a slot cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_core.models.cache import SlotCache
from specdec_core.models.runner import ModelRunner


class LocalRunner(ModelRunner):
    """A runner with its rows in `cache`."""

    cache: SlotCache
    feature_layers: tuple[int, ...] = ()  # their inputs are kept of every token

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    def truncate(self, row: int, length: int) -> None:
        self.cache.truncate(row, length)

    def keep(self, row: int, start: int, kept: Sequence[int]) -> None:
        self.cache.keep(row, start, kept)

    def fork(self, row: int, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.cache.fork(row, rows, lengths)

    def features(self, rows: Sequence[int], places: Sequence[int]) -> Tensor:
        """The features of the tokens at `places[i]` of `rows[i]`, (n, layers · width)."""
        assert self.cache.features is not None, "the runner keeps no features"
        store = self.cache.features.tensor
        at = torch.tensor(self.cache.at(rows, places), device=store.device)
        return store[at[0], 0, at[1]]
