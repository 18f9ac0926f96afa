"""What a forward appends to one row of a head, in one or several parts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from specdec_core.tokens.token_tree import ROOT

Span = tuple[int, int]  # of a row's new tokens


class RowFeed:
    """New tokens of `row`, which holds `length`. Tokens are numbered as in the row's sequence.

    The sequence's first token, which a head is not fed, is left out. The target holds `known`
    tokens of the row. So there are features for every new token that follows one of them."""

    def __init__(
        self,
        row: int,
        length: int,
        tokens: Sequence[int],
        parents: Sequence[int] | None,
        wanted: int,
        known: int,
    ) -> None:
        skipped = length == 0
        self.row, self.length, self.first = row, length, length + skipped
        self.tokens = list(tokens[skipped:])
        if parents is not None and skipped:
            parents = [parent if parent == ROOT else parent - 1 for parent in parents[1:]]
        self.parents = parents
        # Whether the logits after the sequence's first token are wanted.
        self.blank = wanted > len(self.tokens)
        self._wanted_from = max(len(self.tokens) - wanted, 0)
        self._held_by_target = known
        self._known = min(max(known + 1 - self.first, 0), len(self.tokens))

    def before(self, token: int) -> int:
        """The number of the token that new token number `token` follows."""
        if self.parents is None:
            return token - 1
        root = self.first + len(self.tokens) - len(self.parents)
        parent = self.parents[token - root]
        return root + parent if parent != ROOT else root - 1

    @cached_property
    def parts(self) -> list[Span]:
        """The new tokens in parts. A drafted token needs the head's state after the token before
        it, so it comes in a later part; a token with features does not."""
        if not self.tokens:
            return []
        starts = [0]
        for place in range(max(self._known, 1), len(self.tokens)):
            if self.before(self.first + place) >= self.first + starts[-1]:
                starts.append(place)
        return list(zip(starts, [*starts[1:], len(self.tokens)], strict=True))

    def known(self, span: Span) -> range:
        """The numbers of the tokens in `span` that are fed with the target's features."""
        return range(self.first + span[0], self.first + min(span[1], self._known))

    def has_features(self, token: int) -> bool:
        """Whether there are features of the token that new token number `token` follows."""
        return self.before(token) < self._held_by_target

    def numbers(self, span: Span) -> range:
        """The numbers of the tokens in `span`."""
        return range(self.first + span[0], self.first + span[1])

    def wanted(self, span: Span) -> int:
        """The number of last tokens in `span` with wanted logits."""
        return max(span[1] - max(span[0], self._wanted_from), 0)

    def parents_until(self, span: Span) -> Sequence[int] | None:
        """The tree up to the end of `span`; None where that is a chain."""
        if self.parents is None or span[1] <= self._known:
            return None
        return self.parents[: len(self.parents) - len(self.tokens) + span[1]]
