"""Who proposes: the interface of a drafter, and what it sees of a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec_core.config import Sampling
from specdec_core.sampling import RandomStream
from specdec_core.token_tree import TokenTree


@dataclass(slots=True)
class Sequencing:
    """What a drafter may know of a slot: its committed tokens and how it samples."""

    slot: int
    tokens: list[int]  # prompt and output so far; never empty
    sampling: Sampling
    random: RandomStream
    room: int = 0  # candidate tokens that the round may have at most


class Drafter(Protocol):
    """Proposes a token tree for each slot and learns what became of it."""

    def open(self, sequences: Sequence[Sequencing]) -> None:
        """Requests enter their slots."""

    def propose(self, sequences: Sequence[Sequencing]) -> list[TokenTree]:
        """At most `sequence.room` candidate tokens deep for each slot; maybe none."""

    def observe(self, sequence: Sequencing, tree: TokenTree, accepted: int) -> None:
        """The round is committed: `sequence.tokens` now ends in `accepted` tokens of `tree` and one
        of the target's own (or was cut short because the request is finished)."""
