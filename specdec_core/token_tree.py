"""Everything drafted is a token tree; a chain is the tree of width 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from specdec_core.stats import Origin

ROOT = -1


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
    draft_probs: list[Tensor | None] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    draft_forwards: int = 0  # forward passes of the draft model that it took

    @classmethod
    def chain(cls, tokens: Sequence[int], origin: Origin) -> TokenTree:
        """A deterministic chain."""
        n = len(tokens)
        return cls(list(tokens), list(range(-1, n - 1)), [None] * n, [origin] * n)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int, origin: Origin, probs: Tensor | None = None) -> int:
        """Append a node and return its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.draft_probs.append(probs)
        self.origins.append(origin)
        return len(self.tokens) - 1

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def depths(self) -> list[int]:
        """How many nodes are above each node."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return depths

    def children(self) -> dict[int, list[int]]:
        """The children of each inner node (and of ROOT) in the order drawn."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        return children
