"""What the text of a slot may become, as its draft sees it: a tree behind the confirmed text.

The chain of drawn tokens is what will be verified. Behind a rejected one the target says a token of
its own, and that is seldom a surprise: guesses at it are nodes, too, and those that are likely to
be needed are drafted on from beforehand. When the target has spoken, what has grown behind its
token is there already.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import NamedTuple

from torch import Tensor

from specdec_core.tokens.token_tree import ROOT

_MOST = 64  # nodes in the cache from which on only the chain grows


class Source(NamedTuple):
    """What a token was drawn from: the draft's `logits` (vocabulary,), under sampling the
    distribution `probs`, and the state `hidden` (dimension,) where it is watched; all of that by
    the draft's n-th `forward`."""

    forward: int
    logits: Tensor
    probs: Tensor | None
    hidden: Tensor | None


@dataclass(slots=True, eq=False)
class Node:
    """A token behind its `parent`. `score` is the logarithm of the chance that the text comes to
    it. `place` says where the draft's cache holds it: so far behind the plain text, ROOT in it,
    None where it has not been read; `source` what the next token was drawn from, once it has."""

    number: int
    token: int
    position: int  # in the text
    parent: Node | None
    score: float = 0.0
    place: int | None = None
    source: Source | None = None
    drawn: Node | None = None
    guesses: list[Node] = field(default_factory=list)
    told: bool = False

    @property
    def cached(self) -> int:
        """The `place` of a node that has been read."""
        assert self.place is not None
        return self.place

    def child(self, token: int) -> Node | None:
        """The child with that token."""
        if self.drawn is not None and self.drawn.token == token:
            return self.drawn
        return next((guess for guess in self.guesses if guess.token == token), None)


class Canopy:
    """The tree behind the confirmed text, whose last token is `root`. The first `plain` tokens of
    the text are in the cache one behind the other; then come the nodes `read`."""

    def __init__(self, root: Node) -> None:
        self.root = self.tip = root
        self.plain = root.position
        self.read: list[Node] = []
        self.open: list[Node] = []  # nodes that may be read, but for the chain's

    @property
    def parents(self) -> list[int]:
        """Where the parents of the nodes `read` are."""
        return [ROOT if node.parent is None else node.parent.cached for node in self.read]

    def chain(self) -> list[Node]:
        """What has to be read for the chain to grow: its last token, after whatever is missing of
        the text before it."""
        missing = []
        node: Node | None = self.tip
        while node is not None and node.place is None:
            missing.append(node)
            node = node.parent
        return missing[::-1]

    def likely(self, count: int, least: float, end: int, final: frozenset[int]) -> list[Node]:
        """At most `count` other places to read, the likeliest first, whose chance is at `least`
        that, before the position `end` and not behind `final` tokens."""
        if count <= 0 or len(self.read) >= _MOST:
            return []
        lowest = self.root.score + math.log(max(least, 1e-9))
        possible = [
            n
            for n in self.open
            if n.score >= lowest and n.position + 1 < end and n.token not in final
        ]
        return nlargest(count, possible, key=lambda n: n.score)

    def enter(self, nodes: Sequence[Node]) -> None:
        """`nodes`, parents first, have been read, behind all others."""
        for node in nodes:
            node.place = len(self.read)
            self.read.append(node)
        entered = set(nodes)
        self.open = [node for node in self.open if node not in entered]

    def grow(self, node: Node, drawn: Node, guesses: Sequence[Node]) -> None:
        """Behind a node that was read comes this token, or one of these."""
        node.drawn, node.guesses = drawn, list(guesses)
        self.open += guesses
        if node is self.tip:
            self.tip = drawn
        else:
            self.open.append(drawn)

    def settle(self, tried: Sequence[Node]) -> list[int]:
        """Of the nodes that were read last, `tried`, those stay that the chain goes on behind.
        Returns which of them to keep in the cache."""
        taken = [n for n, node in enumerate(tried) if node.drawn is not None]
        del self.read[len(self.read) - len(tried) :]
        for node in tried:
            node.place = None
        self.enter([tried[n] for n in taken])
        return taken

    def agreed(self, tokens: Sequence[int]) -> int:
        """With how many of these tokens, from the first on, the chain begins."""
        count, node = 0, self.root.drawn
        while node is not None and count < len(tokens) and node.token == tokens[count]:
            count, node = count + 1, node.drawn
        return count

    def confirm(self, tokens: Sequence[int], numbers: Iterator[int]) -> list[int]:
        """The text goes on like this; tokens that nobody thought of are new nodes, with new
        `numbers`. Returns which of the nodes that were read to keep in the cache."""
        for token in tokens:
            last = self.root
            self.root = last.child(token) or Node(next(numbers), token, last.position + 1, last)
        path = {self.root}
        first = self.root
        while first.parent is not None:
            first = first.parent
            path.add(first)
        alive, text, kept = {self.root}, [], []
        for node in self.read:
            if node in path:
                text.append(node)
            elif node.parent in alive:
                alive.add(node)
                kept.append(node)
        places = [node.cached for node in (*text, *kept)]
        # Only behind a node that was read can others be read: the text comes first.
        for node in text:
            node.place = ROOT
        for place, node in enumerate(kept):
            node.place = place
        self.plain += len(text)
        self.read = kept
        first = self.root
        while first.place is None and first.parent is not None:
            first = first.parent
        first.parent = None  # nobody needs the text before it
        self.tip = self.root
        while self.tip.drawn is not None:
            self.tip = self.tip.drawn
        self.open = [n for n in self.open if n.parent in alive and n is not self.tip]
        return places

    def drawn(self) -> list[int]:
        """The chain's tokens."""
        tokens = []
        node: Node | None = self.tip
        while node is not None and node is not self.root:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]

    def find(self, number: int) -> Node:
        """A node of the chain or of the text before it. Raises :class:`KeyError`."""
        node: Node | None = self.tip
        while node is not None:
            if node.number == number:
                return node
            node = node.parent
        raise KeyError(number)
