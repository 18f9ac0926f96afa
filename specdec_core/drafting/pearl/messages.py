"""What the two sides of PEARL tell each other: tokens, and now and then a distribution.

Every token that a draft thinks of has a number, and is told with the number of the token that it
follows. So both sides know a tree of what the text may become, and neither has to ask the other
what a message was about: a token whose predecessor is not known any more is of no use.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec_core.config import ChainSettings, Sampling

# Of a distribution's entries, so many at most may be above 0 for it to travel without its zeros.
_SPARSE = 0.25


class Configure(NamedTuple):
    """Draft in this way from now on, up to `ahead` tokens beyond what the target has confirmed,
    at up to `width` places of a slot's tree in each forward, beside the candidates' end those that
    the text comes to with a chance of at least `least`."""

    drafter: ChainSettings
    slots: int
    ahead: int
    width: int
    least: float
    vocab_size: int
    eos_token_ids: frozenset[int]


class Ready(NamedTuple):
    """The answer to :class:`Configure`: whatever it takes is loaded."""


class Refused(NamedTuple):
    """The other answer to :class:`Configure`: why it cannot be done."""

    reason: str


class Begin(NamedTuple):
    """A slot's text, whose last token has the number `root`; it ends with `end` tokens at the
    latest."""

    slot: int
    root: int
    tokens: list[int]
    end: int
    sampling: Sampling
    seed: int


class Commit(NamedTuple):
    """The target has confirmed that a slot's text goes on with these tokens. Of `drafted`
    candidates it accepted so many; `choices` are its own behind the text before and behind those
    that it has read."""

    slot: int
    tokens: list[int]
    drafted: int
    accepted: int
    choices: list[int]


class End(NamedTuple):
    """The slot's request is over; its text has gone on with these tokens."""

    slot: int
    tokens: list[int]


class Ask(NamedTuple):
    """From what was the token behind this one drawn?"""

    slot: int
    node: int


# A token: its number, that of the token before it, what it is, whether it was drawn from what the
# draft says there (else it is a guess at what the target may say instead), and under rejection
# sampling with what probability.
Sprout = tuple[int, int, int, bool, float | None]


class Drafted(NamedTuple):
    """Tokens of a slot, by one forward, which took from `began` to `ended` on the draft's clock,
    looked at so many places and brought so many new `candidates`."""

    slot: int
    sprouts: list[Sprout]
    places: int
    candidates: int
    began: float
    ended: float


class Pause(NamedTuple):
    """The draft's policy would have the candidates up to this one verified now."""

    slot: int
    node: int


class Distribution(NamedTuple):
    """The answer to :class:`Ask`: `values` of a distribution over `size` tokens, at `places` or
    at all of them."""

    slot: int
    node: int
    size: int
    places: np.ndarray | None
    values: np.ndarray

    @classmethod
    def of(cls, slot: int, node: int, probabilities: Tensor) -> Distribution:
        """`probabilities` (vocabulary,), as small as they are without loss."""
        values = probabilities.float().cpu().numpy()
        places = values.nonzero()[0]
        if len(places) > _SPARSE * len(values):
            return cls(slot, node, len(values), None, values)
        return cls(slot, node, len(values), places.astype(np.int32), values[places])

    def tensor(self) -> Tensor:
        """(size,)"""
        values = torch.from_numpy(self.values.copy())
        if self.places is None:
            return values
        whole = torch.zeros(self.size)
        whole[torch.from_numpy(self.places.astype(np.int64))] = values
        return whole
