"""The best static token tree under a budget of nodes, planned from acceptance rates by rank.

At every node the path continues with probability p[r] to the child of rank r, the (r + 1)-th most
likely token of the draft model (Sequoia's positional acceptance; Chen et al., 2024, §4.1). The
expected length of the accepted path is then the sum over all nodes of the product of the rates on
the path to the node, and the best tree of a number of nodes follows by dynamic programming over its
subtrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product

import numpy as np

Rates = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class PlannedTree:
    """A static tree: the number of children of each node of each level, the root being level 0.
    Nodes of a level are in the order of their parents, siblings in the order of their ranks."""

    children: tuple[tuple[int, ...], ...]
    expected: float  # accepted candidates a round

    @property
    def nodes(self) -> int:
        return sum(map(sum, self.children))

    @property
    def depth(self) -> int:
        """Levels of candidates; as many forwards of the draft model."""
        return len(self.children)

    @property
    def draft_tokens(self) -> int:
        """Distributions that the draft model computes for it: one a node with children."""
        return sum(count > 0 for level in self.children for count in level)

    @cached_property
    def branching(self) -> tuple[int, ...] | None:
        """Children a node by level, if this is a k-configuration: all nodes of a level have as many
        children. Else None."""
        uniform = all(len(set(level)) == 1 for level in self.children)
        return tuple(level[0] for level in self.children) if uniform else None

    @property
    def label(self) -> str:
        """`4·2·2·1` for a k-configuration, else its levels' sizes: `4|6|5`."""
        if self.branching is not None:
            return "·".join(map(str, self.branching))
        return "|".join(str(sum(level)) for level in self.children)


def expected_accepted(acceptance: Rates, children: Sequence[Sequence[int]]) -> float:
    """The expected length of the accepted path in a tree of :class:`PlannedTree`'s form."""
    expected, reached = 0.0, [1.0]
    for level in children:
        reached = [
            chance * acceptance[rank]
            for chance, count in zip(reached, level, strict=True)
            for rank in range(count)
        ]
        expected += sum(reached)
    return expected


def uniform_tree(acceptance: Rates, branching: Sequence[int]) -> PlannedTree:
    """The tree of a k-configuration."""
    children, width = [], 1
    for count in branching:
        children.append((count,) * width)
        width *= count
    return PlannedTree(tuple(children), expected_accepted(acceptance, children))


class StaticTrees:
    """The best trees of any number of nodes and levels up to its bounds (Sequoia, §4.1.2).

    `values[d, n]` is the expected length of the accepted path in the best tree of at most n nodes
    in at most d levels.

    F(n, d) is the most expected below a node with n nodes in at most d levels, and G(r, m) the most
    of its children of ranks r and higher with m nodes among them:
    G(r, m) = max over j of p[r] (1 + F(j - 1, d - 1)) + G(r + 1, m - j), or 0; F(n, d) = G(0, n).
    """

    def __init__(self, acceptance: Rates, nodes: int, depth: int) -> None:
        rates = self.acceptance = np.asarray(acceptance, dtype=float)[:nodes]
        if rates.ndim != 1 or not len(rates) or rates.min() < 0 or rates.sum() > 1 + 1e-9:
            raise ValueError("acceptance rates by rank are probabilities that add up to at most 1")
        ranks = len(self.acceptance)
        self.values = np.zeros((depth + 1, nodes + 1))
        # Nodes of the subtree of the child of rank r, itself included; 0 where there is no child.
        self._size = np.zeros((depth + 1, ranks, nodes + 1), dtype=int)
        for d in range(1, depth + 1):
            later = np.zeros(nodes + 1)
            for r in reversed(range(ranks)):
                child = self.acceptance[r] * (1 + self.values[d - 1])  # with j = 1, 2, … nodes
                best = np.zeros(nodes + 1)
                for m in range(1, nodes + 1):
                    expected = child[:m] + later[m - 1 :: -1]
                    j = int(expected.argmax())
                    if expected[j] > 0:
                        best[m], self._size[d, r, m] = expected[j], j + 1
                later = best
            self.values[d] = later

    def tree(self, nodes: int, depth: int) -> PlannedTree:
        """The best of at most `nodes` nodes in at most `depth` levels."""
        levels, inner = [], [nodes]
        while depth and any(inner):
            sizes = [list(self._split(depth, budget)) for budget in inner]
            levels.append(tuple(map(len, sizes)))
            inner = [size - 1 for size in chain.from_iterable(sizes)]
            depth -= 1
        children = tuple(level for level in levels if any(level))
        return PlannedTree(children, expected_accepted(self.acceptance, children))

    def candidates(self, nodes: int | None = None) -> list[PlannedTree]:
        """Every tree that is the best for some number of levels and of nodes, at most `nodes`."""
        depths, sizes = (size - 1 for size in self.values.shape)
        most = sizes if nodes is None else min(nodes, sizes)
        planned = (self.tree(n, d) for d, n in product(range(1, depths + 1), range(1, most + 1)))
        return list({tree.children: tree for tree in planned}.values())

    def fastest(self, seconds: Callable[[PlannedTree], float], nodes: int) -> PlannedTree:
        """The tree of at most `nodes` nodes with the most tokens a second: (1 + expected) over the
        `seconds` of a round with it."""
        return max(self.candidates(nodes), key=lambda tree: (1 + tree.expected) / seconds(tree))

    def _split(self, depth: int, budget: int) -> Iterator[int]:
        """The number of nodes of each child's subtree."""
        for sizes in self._size[depth]:
            size = int(sizes[budget])
            if not size:
                return
            yield size
            budget -= size
