"""What may follow the confirmed sequence of a slot: the tree that both sides of PEARL hold.

The chain of drawn tokens is what the target verifies. In place of a rejected token the target
chooses its own, which is often predictable. So the tree also has guesses at it, and the likely ones
are drafted on in advance. When the target has chosen one of them, its continuation is drafted
already.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import takewhile
from typing import NamedTuple

from torch import Tensor

from specdec_core.tokens.token_tree import ROOT

_MAX_CACHED = 64  # with this many nodes in the cache only the chain grows


class Source(NamedTuple):
    """What a token was drawn from: the `logits` (vocabulary,) of the draft's n-th `forward`, under
    sampling the distribution `probs`, and the state `hidden` (dimension,) where it is watched."""

    forward: int
    logits: Tensor
    probs: Tensor | None
    hidden: Tensor | None


@dataclass(slots=True, eq=False)
class Node:
    """A token after its `parent`, with the token `drawn` after it and `guesses` at another one.
    Both sides know it by its `number`. `chance` is the probability with which it was drawn, for
    rejection sampling.

    The other values are the draft's own. `score` is the log probability that the sequence reaches
    the node. `place` is its offset in the draft's cache from the plain sequence; ROOT in the plain
    sequence, None while the draft has not read it. `source` is what the next token was drawn from,
    None before. `sent` tells whether the target knows the node.
    """

    number: int
    token: int
    position: int  # in the sequence
    parent: Node | None
    chance: float | None = None
    drawn: Node | None = None
    guesses: list[Node] = field(default_factory=list)
    score: float = 0.0
    place: int | None = None
    source: Source | None = None
    sent: bool = False

    @property
    def cached(self) -> int:
        """The `place` of a node that the draft has read."""
        assert self.place is not None
        return self.place

    def child(self, token: int) -> Node | None:
        """The child with that token."""
        if self.drawn is not None and self.drawn.token == token:
            return self.drawn
        return next((guess for guess in self.guesses if guess.token == token), None)

    def up(self) -> Iterator[Node]:
        """This node and its ancestors."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


class CandidateTree:
    """The tree after `root`, a token of the sequence that both sides know."""

    def __init__(self, root: Node) -> None:
        self.root = root

    def chain(self) -> list[Node]:
        """The drawn nodes, each after the other, from the root on."""
        nodes, node = [], self.root.drawn
        while node is not None:
            nodes.append(node)
            node = node.drawn
        return nodes

    def find(self, number: int) -> Node | None:
        """The node with that number; the chain is searched first."""
        pending = [self.root]
        while pending:
            node = pending.pop()
            if node.number == number:
                return node
            pending += node.guesses
            if node.drawn is not None:
                pending.append(node.drawn)
        return None


class DraftTree(CandidateTree):
    """The draft's tree; `root` is the last confirmed token. The draft's cache holds the first
    `plain` tokens of the sequence, then the nodes `read`. The chain ends in `tip`."""

    def __init__(self, root: Node) -> None:
        super().__init__(root)
        self.tip = root
        self.plain = root.position
        self.read: list[Node] = []
        self.open: list[Node] = []  # nodes that may be read, without the chain's

    @property
    def parents(self) -> list[int]:
        """The places of the parents of the nodes `read`."""
        return [ROOT if node.parent is None else node.parent.cached for node in self.read]

    def unread(self) -> list[Node]:
        """The nodes to read for the chain to grow: its unread end."""
        return [*takewhile(lambda node: node.place is None, self.tip.up())][::-1]

    def likely(self, count: int, least: float, end: int, final: frozenset[int]) -> list[Node]:
        """At most `count` other nodes to read, the most likely first: those with a probability of
        at least `least`, before the position `end`, and not `final` tokens."""
        if count <= 0 or len(self.read) >= _MAX_CACHED:
            return []
        lowest = self.root.score + math.log(max(least, 1e-9))
        possible = [
            n
            for n in self.open
            if n.score >= lowest and n.position + 1 < end and n.token not in final
        ]
        return nlargest(count, possible, key=lambda n: n.score)

    def enter(self, nodes: Sequence[Node]) -> None:
        """The draft has read `nodes`, parents first; they follow all earlier nodes in the cache."""
        for node in nodes:
            node.place = len(self.read)
            self.read.append(node)
        entered = set(nodes)
        self.open = [node for node in self.open if node not in entered]

    def grow(self, node: Node, drawn: Node, guesses: Sequence[Node]) -> None:
        """Add the children of a node that was read."""
        node.drawn, node.guesses = drawn, list(guesses)
        self.open += guesses
        if node is self.tip:
            self.tip = drawn
        else:
            self.open.append(drawn)

    def settle(self, tried: Sequence[Node]) -> list[int]:
        """Drop the nodes of `tried`, which were read last, that the chain did not reach. Returns
        the indices of the nodes that stay in the cache."""
        kept = [n for n, node in enumerate(tried) if node.drawn is not None]
        del self.read[len(self.read) - len(tried) :]
        for node in tried:
            node.place = None
        self.enter([tried[n] for n in kept])
        return kept

    def agreed(self, tokens: Sequence[int]) -> int:
        """The number of `tokens`, from the first on, that the chain begins with."""
        pairs = zip(self.chain(), tokens, strict=False)
        return len([*takewhile(lambda pair: pair[0].token == pair[1], pairs)])

    def confirm(self, tokens: Sequence[int], numbers: Iterator[int]) -> list[int]:
        """The sequence continues with `tokens`. Tokens that are not in the tree become new nodes,
        with the next of `numbers`. Returns the places of the nodes to keep in the cache."""
        for token in tokens:
            last = self.root
            self.root = last.child(token) or Node(next(numbers), token, last.position + 1, last)
        path, reachable = set(self.root.up()), {self.root}
        text, kept = [], []
        for node in self.read:
            if node in path:
                text.append(node)
            elif node.parent in reachable:
                reachable.add(node)
                kept.append(node)
        places = [node.cached for node in (*text, *kept)]
        # The sequence comes first: the cache can only grow after what the draft has read.
        for node in text:
            node.place = ROOT
        for place, node in enumerate(kept):
            node.place = place
        self.plain += len(text)
        self.read = kept
        first = self.root
        while first.place is None and first.parent is not None:
            first = first.parent
        first.parent = None  # the sequence before it is not needed
        self.tip = [self.root, *self.chain()][-1]
        self.open = [n for n in self.open if n.parent in reachable and n is not self.tip]
        return places

    def drawn(self) -> list[int]:
        """The chain's tokens."""
        return [node.token for node in self.chain()]
