"""Prompt lookup decoding (Saxena, 2023): what followed this n-gram before may follow it again."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_core.config import PromptLookupDrafter
from specdec_core.drafters.base import Sequencing
from specdec_core.stats import Origin
from specdec_core.token_tree import TokenTree


class _Index:
    """Where each n-gram of a growing text was last followed by something."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self._follower: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def extend(self, tokens: list[int]) -> None:
        for position in range(max(self._indexed, 1), len(tokens)):
            for size in self.sizes:
                if size <= position:
                    self._follower[tuple(tokens[position - size : position])] = position
        self._indexed = len(tokens)

    def lookup(self, tokens: list[int], count: int) -> list[int]:
        """What followed the longest known n-gram that the text ends in."""
        for size in self.sizes:
            if size < len(tokens):
                start = self._follower.get(tuple(tokens[-size:]))
                if start is not None:
                    return tokens[start : start + count]
        return []


class PromptLookup:
    """Proposes the continuation of the longest suffix n-gram that occurred before, the latest
    occurrence first. The proposal is deterministic, a one-hot draft distribution."""

    def __init__(self, settings: PromptLookupDrafter) -> None:
        self.settings = settings
        self._indices: dict[int, _Index] = {}

    def open(self, sequences: Sequence[Sequencing]) -> None:
        for sequence in sequences:
            index = _Index(self.settings.min_ngram, self.settings.max_ngram)
            self._indices[sequence.slot] = index

    def propose(self, sequences: Sequence[Sequencing]) -> list[TokenTree]:
        trees = []
        for sequence in sequences:
            index = self._indices[sequence.slot]
            index.extend(sequence.tokens)
            count = min(sequence.room, self.settings.max_tokens)
            found = index.lookup(sequence.tokens, count) if count else []
            trees.append(TokenTree.chain(found, Origin.LOOKUP))
        return trees

    def observe(self, sequence: Sequencing, tree: TokenTree, accepted: int) -> None:
        """The index reads the committed text itself."""
