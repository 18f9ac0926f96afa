"""What the two sides of PEARL tell each other: tokens, and now and then a distribution.

A slot's corrections are numbered. A draft answers with the number of the last one that it has
heeded, so that what it drafted before it heard of a correction can be told from what it drafts now.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec_core.config import DrafterSettings, Sampling

# Of a distribution's entries, so many at most may be above 0 for it to travel without its zeros.
_SPARSE = 0.25


class Configure(NamedTuple):
    """Draft in this way from now on, up to `ahead` tokens beyond what the target has confirmed."""

    drafter: DrafterSettings
    slots: int
    ahead: int
    vocab_size: int
    eos_token_ids: frozenset[int]


class Begin(NamedTuple):
    """A request enters a slot with its text; it ends with `end` tokens at the latest."""

    slot: int
    serial: int
    tokens: list[int]
    end: int
    sampling: Sampling
    seed: int


class Commit(NamedTuple):
    """The target has confirmed the first `length` tokens of a slot's text, which its own token
    follows where it has one. Of `drafted` candidates it accepted so many."""

    slot: int
    serial: int
    length: int
    own: int | None
    drafted: int
    accepted: int


class End(NamedTuple):
    """The slot's request is over."""

    slot: int


class Ask(NamedTuple):
    """From what was the token at this position of the slot's text drawn?"""

    slot: int
    position: int


class Drafted(NamedTuple):
    """Tokens of a slot from position `start` on, by so many forwards, which took from `began` to
    `ended` on the draft's clock; under sampling, with their own draft probabilities."""

    slot: int
    serial: int
    start: int
    tokens: list[int]
    probabilities: list[float] | None
    forwards: int
    began: float
    ended: float


class Pause(NamedTuple):
    """The draft's policy would have the slot's candidates verified now."""

    slot: int
    serial: int


class Distribution(NamedTuple):
    """The answer to :class:`Ask`: `values` of a distribution over `size` tokens, at `places` or
    at all of them."""

    slot: int
    position: int
    size: int
    places: np.ndarray | None
    values: np.ndarray

    @classmethod
    def of(cls, slot: int, position: int, probabilities: Tensor) -> Distribution:
        """`probabilities` (vocabulary,), as small as they are without loss."""
        values = probabilities.float().cpu().numpy()
        places = values.nonzero()[0]
        if len(places) > _SPARSE * len(values):
            return cls(slot, position, len(values), None, values)
        return cls(slot, position, len(values), places.astype(np.int32), values[places])

    def tensor(self) -> Tensor:
        """(size,)"""
        values = torch.from_numpy(self.values.copy())
        if self.places is None:
            return values
        whole = torch.zeros(self.size)
        whole[torch.from_numpy(self.places.astype(np.int64))] = values
        return whole
