"""Growing token trees in a draft model: one forward pass a level, for all slots together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec_core.drafting.context import DraftContext
from specdec_core.drafting.drafter import SlotState
from specdec_core.drafting.warped import places, warped
from specdec_core.models.runner import Batch
from specdec_core.tokens.acceptance import Places
from specdec_core.tokens.token_tree import ROOT, TokenOrigin, TokenTree
from specdec_core.tokens.topology import after_text


@dataclass(slots=True)
class Level:
    """n places where trees may grow, and the draft model's predictions at these places."""

    trees: list[int]  # (n,) which tree
    nodes: list[int]  # (n,) after which of its nodes, or ROOT
    at: Places  # (n,) the predictions
    hidden: Tensor | None  # (n, dimension) input of the output layer, where watched


class Growth:
    """The trees of one round, one for each of `sequences`.

    `cached[i]` gives the cache offset from the committed sequence of each node of tree i that the
    draft model has read.
    """

    def __init__(self, context: DraftContext, sequences: Sequence[SlotState]) -> None:
        self.context, self.sequences = context, sequences
        self.trees = [TokenTree() for _ in sequences]
        self.cached: list[dict[int, int]] = [{} for _ in sequences]
        self._read: dict[int, list[int]] = {}  # the parents of the nodes read, by tree

    def read(self, wanted: Mapping[int, Sequence[int]]) -> Level:
        """Feed the draft model the nodes `wanted[i]` of tree i, parents first; or [ROOT], to begin
        with. Tokens of the sequence that it has not read go before them."""
        feed, parents = [], []
        for i, nodes in wanted.items():
            tree, cached = self.trees[i], self.cached[i]
            text = [] if i in self._read else self.context.pending(self.sequences[i])
            shape = self._read.setdefault(i, [])
            new = [node for node in nodes if node != ROOT]
            for node in new:
                parent = tree.parents[node]
                cached[node] = len(shape)
                shape.append(ROOT if parent == ROOT else cached[parent])
            feed.append(text + [tree.tokens[node] for node in new])
            parents.append(after_text(len(text), shape))
            tree.draft_forwards += 1
            tree.draft_tokens += len(nodes)
        rows = [self.sequences[i].slot for i in wanted]
        counts = [len(nodes) for nodes in wanted.values()]
        output = self.context.runner.forward(Batch(rows, feed, parents, counts))
        growing = list(wanted)
        output = warped(
            output,
            [self.sequences[i] for i in growing],
            lambda n: [self.trees[growing[n]].path(node) for node in wanted[growing[n]]],
        )
        trees = [i for i, nodes in wanted.items() for _ in nodes]
        flat = [node for nodes in wanted.values() for node in nodes]
        drafted = [len(self.trees[i].path(node)) for i, node in zip(trees, flat, strict=True)]
        sequences = [self.sequences[i] for i in trees]
        positions = [len(s.tokens) + count for s, count in zip(sequences, drafted, strict=True)]
        return Level(trees, flat, places(sequences, positions, output), output.hidden)

    def branch(
        self, level: Level, counts: Sequence[int], replacement: bool = False
    ) -> list[list[int]]:
        """Add `counts[n]` children at place n of `level`, drawn from the draft distribution, or
        when greedy the most likely tokens; without `replacement` there may be fewer to draw.
        Returns the new nodes of each place, in the order drawn."""
        children = level.at.siblings(counts, replacement)
        return [
            [self.trees[i].add(token, parent, TokenOrigin.DRAFT, q) for token, q in drawn]
            for i, parent, drawn in zip(level.trees, level.nodes, children, strict=True)
        ]
