"""The messages between the two sides of PEARL: tokens, and now and then a distribution.

Every drafted token has a number and is sent with the number of the token before it. So both sides
hold a tree of what may follow the sequence (:mod:`specdec_core.drafting.pearl.tree`), and messages
may cross: if the token before has been dropped meanwhile, the token is dropped, too.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import numpy as np
import torch
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

from specdec_core.config import AnyChain, Sampling
from specdec_core.tokens.text_warper import TextRules

# A distribution is sent without its zeros when at most this share of its entries is above 0.
_SPARSE = 0.25


class Configure(NamedTuple):
    """Draft in this way from now on: up to `ahead` tokens beyond what the target has confirmed, at
    up to `width` nodes of a slot's tree in each forward, the end of the chain and other nodes that
    the sequence reaches with a probability of at least `least`."""

    drafter: AnyChain
    slots: int
    ahead: int
    width: int
    least: float
    vocab_size: int
    eos_token_ids: frozenset[int]


class Configured(NamedTuple):
    """The answer to :class:`Configure`: everything is loaded, for sequences of up to `length`
    tokens; or a `refusal`, why it cannot be done."""

    length: int
    refusal: str | None = None


class Begin(NamedTuple):
    """A slot's sequence; its last token has the number `root`. It will have at most `end`
    tokens."""

    slot: int
    root: int
    tokens: list[int]
    end: int
    sampling: Sampling
    seed: int
    rules: TextRules | None = None  # sampling rules that depend on the sequence


class Compiling(NamedTuple):
    """The grammar of the sequence that ends in the token `root` is being compiled: verify without
    candidates meanwhile."""

    slot: int
    root: int


class Commit(NamedTuple):
    """The target has confirmed the next tokens of a slot's sequence. Of `drafted` candidates it has
    `accepted` some; `choices` are its own tokens after the sequence before the round and after each
    candidate that it has read."""

    slot: int
    tokens: list[int]
    drafted: int
    accepted: int
    choices: list[int]


class End(NamedTuple):
    """The slot's request is over; `tokens` are the last of its sequence."""

    slot: int
    tokens: list[int]


class RequestDistribution(NamedTuple):
    """Asks for the distribution that the token after this node was drawn from."""

    slot: int
    node: int


# A token: its number, the number of the token before it, the token itself, whether the draft drew
# it (else the target may choose it instead), and under rejection sampling its probability.
DraftedToken = tuple[int, int, int, bool, float | None]


class Drafted(NamedTuple):
    """New tokens of a slot by one forward, from `began` to `ended` on the draft's clock. It read
    `nodes` nodes of the slot's tree and made the chain `candidates` longer."""

    slot: int
    tokens: list[DraftedToken]
    nodes: int
    candidates: int
    began: float
    ended: float


class Pause(NamedTuple):
    """The draft's length policy stops the chain at this candidate: verify it now."""

    slot: int
    node: int


class Distribution(NamedTuple):
    """The answer to :class:`RequestDistribution`: the `values` (float32) of a distribution over
    `size` tokens, at `places` (int32) or at all of them."""

    slot: int
    node: int
    size: int
    places: bytes | None
    values: bytes

    @classmethod
    def of(cls, slot: int, node: int, probabilities: Tensor) -> Distribution:
        """The message for `probabilities` (vocabulary,), as short as possible without loss."""
        values = probabilities.float().cpu().numpy()
        places = values.nonzero()[0]
        if len(places) > _SPARSE * len(values):
            return cls(slot, node, len(values), None, values.tobytes())
        return cls(
            slot, node, len(values), places.astype(np.int32).tobytes(), values[places].tobytes()
        )

    def tensor(self) -> Tensor:
        """(size,)"""
        values = torch.from_numpy(np.frombuffer(self.values, np.float32).copy())
        if self.places is None:
            return values
        whole = torch.zeros(self.size)
        whole[torch.from_numpy(np.frombuffer(self.places, np.int32).astype(np.int64))] = values
        return whole


Message = (
    Configure
    | Configured
    | Begin
    | Compiling
    | Commit
    | End
    | RequestDistribution
    | Drafted
    | Pause
    | Distribution
)
_KINDS = get_args(Message)
_BYTES = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
_ADAPTERS: list[TypeAdapter[Message]] = [TypeAdapter(kind, config=_BYTES) for kind in _KINDS]


def encode(message: Message) -> bytes:
    """The message's kind in one byte, and its values as JSON."""
    kind = _KINDS.index(type(message))
    return bytes([kind]) + _ADAPTERS[kind].dump_json(message)


def decode(data: bytes | bytearray) -> Message:
    """The message that was encoded. Raises :class:`ValueError` where it is none."""
    return _ADAPTERS[data[0]].validate_json(bytes(data[1:]))
