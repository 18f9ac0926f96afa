"""Everything drafted is a token tree; a chain is the tree of width 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ROOT = -1


class TokenOrigin(StrEnum):
    """Where an output token came from."""

    DRAFT = "draft"
    LOOKUP = "lookup"  # found earlier in the text, or in earlier outputs
    CACHE = "cache"  # a phrase kept from earlier rounds
    GRAMMAR = "grammar"  # what the grammar of the output left no choice about
    TARGET = "target"  # drawn by the target to begin a tree
    CORRECTION = "correction"  # the target's replacement for a rejected token
    BONUS = "bonus"  # the target's own token after everything was accepted


@dataclass(frozen=True, slots=True)
class RemoteDistribution:
    """The distribution that a candidate was drawn from, in another process: the candidate's
    probability, and a function that fetches all of it."""

    probability: float
    fetch: Callable[[], Tensor]


@dataclass(slots=True)
class TokenTree:
    """Candidate tokens in the order drawn, parents before children.

    `parents[i]` is a node or ROOT, the last token of the committed text. `draft_probs[i]` is the
    distribution (vocabulary,) that node i was drawn from; None is a deterministic proposal, the
    one-hot distribution. Of siblings drawn without replacement each carries what was left of the
    distribution when it was drawn. Greedy decoding needs no distributions.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    draft_probs: list[Tensor | RemoteDistribution | None] = field(default_factory=list)
    origins: list[TokenOrigin] = field(default_factory=list)
    draft_forwards: int = 0  # forward passes of the draft model
    draft_tokens: int = 0  # positions at which these gave a distribution: one a forward in a chain
    arm: int | None = None  # which of a bandit's arms proposed it
    fed: int | None = None  # number of its first nodes, which the target has read; None: all
    begun: int = 0  # number of its first nodes that the target drew

    @classmethod
    def chain(cls, tokens: Sequence[int], origin: TokenOrigin) -> TokenTree:
        """A deterministic chain."""
        n = len(tokens)
        return cls(list(tokens), list(range(-1, n - 1)), [None] * n, [origin] * n)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self,
        token: int,
        parent: int,
        origin: TokenOrigin,
        probs: Tensor | RemoteDistribution | None = None,
    ) -> int:
        """Append a node and return its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.draft_probs.append(probs)
        self.origins.append(origin)
        return len(self.tokens) - 1

    def graft(self, parent: int, tokens: Sequence[int], origin: TokenOrigin) -> int:
        """Add the deterministic phrase `tokens` below `parent`, sharing nodes of equal tokens;
        returns the phrase's last node."""
        for token in tokens:
            node = self._child(parent, token)
            parent = self.add(token, parent, origin) if node is None else node
        return parent

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The longest path from the root that agrees with the beginning of `tokens`."""
        path: list[int] = []
        for token in tokens:
            node = self._child(path[-1] if path else ROOT, token)
            if node is None:
                break
            path.append(node)
        return path

    def _child(self, parent: int, token: int) -> int | None:
        """The first child of `parent` that is `token`."""
        children = (
            node
            for node in range(parent + 1, len(self))
            if self.parents[node] == parent and self.tokens[node] == token
        )
        return next(children, None)

    @property
    def read(self) -> int:
        """The number of its first nodes, which the target has read."""
        return len(self) if self.fed is None else self.fed

    @property
    def depth(self) -> int:
        """Nodes on its longest path."""
        return max(self.depths(), default=-1) + 1

    def depths(self) -> list[int]:
        """How many nodes are above each node."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return depths

    def path(self, node: int) -> list[int]:
        """The tokens on the way to `node`, its own included; none to ROOT."""
        path: list[int] = []
        while node != ROOT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def children(self) -> dict[int, list[int]]:
        """The children of each inner node (and of ROOT) in the order drawn."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        return children
