"""Look up the longest suffix of a sequence in a datastore, and what follows it in the documents."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.drafting.cards import find_folder, read_card
from specdec_core.drafting.datastores.card import (
    CARD,
    STARTS,
    SUFFIXES,
    TOKENS,
    DatastoreCard,
    token_type,
)
from specdec_core.models.fingerprints import tokenizer_digest

DATASTORES = "datastores"  # their folder in the workspace


@dataclass(frozen=True, slots=True)
class Matches:
    """The suffixes `first` … `end` − 1 of a datastore begin with the last `length` tokens of a text
    and continue."""

    length: int = 0
    first: int = 0
    end: int = 0

    def __len__(self) -> int:
        return self.end - self.first


class Datastore:
    """A datastore's files, mapped into memory: only what is looked up is read."""

    def __init__(
        self, card: DatastoreCard, tokens: np.ndarray, suffixes: np.ndarray, starts: np.ndarray
    ) -> None:
        self.card = card
        self.tokens, self.suffixes = tokens, suffixes
        self._bytes = tokens.view(np.uint8).data
        self._begins, self._starts = suffixes.data, starts.data
        self._size = tokens.dtype.itemsize
        self._letter = "H" if self._size == 2 else "I"

    def longest(self, text: Sequence[int], least: int, most: int) -> Matches:
        """The matches of the longest suffix of `text`, of `least` … `most` tokens, that is followed
        by something; none where there is no such suffix."""
        end = text[-most:]
        for place in range(len(end) - 1, -1, -1):
            if end[place] >= self.card.separator:  # a model may have more entries than tokens
                end = end[place + 1 :]
                break
        if len(end) < least:
            return Matches()
        phrase = struct.pack(f">{len(end)}{self._letter}", *end)
        # What follows a phrase also follows its suffixes, so the lengths can be bisected.
        matched, at = 0, -1
        low, high = least, len(end)
        while low <= high:
            length = (low + high) // 2
            first = self._first(end[-length], phrase[-length * self._size :])
            if first >= 0:
                matched, at, low = length, first, length + 1
            else:
                high = length - 1
        if not matched:
            return Matches()
        ended = phrase[-matched * self._size :] + self._packed(self.card.separator)
        return Matches(matched, at, self._bisect(end[-matched], ended))

    def continuations(self, matches: Matches, depth: int, most: int) -> list[list[int]]:
        """What follows the `matches`: the tokens at each of the next `depth` places, in the
        order of the suffixes. Of more than `most` matches, `most` evenly spread ones: in sorted
        order this keeps the shares of the continuations. Tokens after a separator are
        meaningless."""
        if len(matches) <= most:
            chosen = self.suffixes[matches.first : matches.end]
        else:
            chosen = self.suffixes[
                np.arange(most, dtype=np.int64) * len(matches) // most + matches.first
            ]
        places = chosen + (np.arange(depth)[:, None] + matches.length)
        return list(self.tokens[np.minimum(places, len(self.tokens) - 1)].tolist())

    def _first(self, token: int, phrase: bytes) -> int:
        """The first suffix that begins with `phrase`, which begins with `token`, and continues;
        −1 where there is none."""
        first = self._bisect(token, phrase)
        if first == self._starts[token + 1]:
            return -1
        begin = self._begins[first] * self._size
        end = begin + len(phrase)
        if self._bytes[begin:end] != phrase:
            return -1
        # The separator is the largest token: where it follows first, nothing else does.
        if self._bytes[end : end + self._size] == self._packed(self.card.separator):
            return -1
        return first

    def _bisect(self, token: int, phrase: bytes) -> int:
        """The number of suffixes that sort before `phrase`, which begins with `token`."""
        size, width, tokens = self._size, len(phrase), self._bytes

        def begins(suffix: int) -> bytes:
            return tokens[suffix * size : suffix * size + width].tobytes()

        low, high = self._starts[token], self._starts[token + 1]
        return bisect_left(self._begins, phrase, low, high, key=begins)

    def _packed(self, token: int) -> bytes:
        return token.to_bytes(self._size, "big")


def resolve_datastore(name: str) -> Path:
    """The folder of a datastore: a path, or the name of one in the workspace."""
    return find_folder(name, DATASTORES, CARD)


def open_datastore(name: str | Path, tokenizer: str | None = None) -> Datastore:
    """The datastore of this name or folder. With `tokenizer` it must have that digest. Raises
    :class:`UserError` where there is none, its files are broken, or it is of another tokenizer."""
    folder = resolve_datastore(str(name))
    made = "`specdec datastore` builds one"
    card = read_card(DatastoreCard, folder / CARD, str(name), "datastore", made)
    if tokenizer is not None and card.tokenizer != tokenizer:
        raise UserError(
            f"datastore {name}: its tokens are of another tokenizer (vocabulary "
            f"{card.tokenizer[:8]}, this pair's is {tokenizer[:8]}); build one for this pair"
        )
    try:
        tokens, suffixes, starts = (
            np.load(folder / file, mmap_mode="r") for file in (TOKENS, SUFFIXES, STARTS)
        )
    except (OSError, ValueError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{folder}: a broken datastore ({reason}); build it again") from None
    length = card.tokens + card.documents
    shapes = (tokens.shape, suffixes.shape, starts.shape)
    if (
        shapes != ((length,), (length,), (card.separator + 2,))
        or tokens.dtype != token_type(card.separator)
        or suffixes.dtype not in (np.int32, np.int64)
        or starts.dtype != np.int64
    ):
        raise UserError(f"{folder}: its files do not belong to its {CARD}; build it again")
    return Datastore(card, *map(np.asarray, (tokens, suffixes, starts)))


def check_datastores(configurations: Iterable[Configuration], tokenizer: Any) -> None:
    """Raises :class:`UserError` where a drafter uses a datastore that is missing or has another
    tokenizer."""
    for name in dict.fromkeys(name for c in configurations for name in c.datastores):
        open_datastore(name, tokenizer_digest(tokenizer))
