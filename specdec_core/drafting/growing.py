"""Growing token trees in a draft model: one forward pass a level, for all slots together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec_core.drafting.context import DraftContext
from specdec_core.drafting.drafter import SlotState
from specdec_core.tokens.acceptance import Places
from specdec_core.tokens.token_tree import ROOT, Origin, TokenTree


@dataclass(slots=True)
class Level:
    """Where trees may go on, n places of several trees, and what the draft model says there."""

    trees: list[int]  # (n,) which tree
    nodes: list[int]  # (n,) behind which of its nodes, or ROOT
    logits: Tensor  # (n, vocabulary)
    hidden: Tensor | None  # (n, dimension) what the output layer made them from, where watched


@dataclass(slots=True)
class Children:
    """What was put behind the n places of a level."""

    nodes: list[list[int]]  # (n,) new nodes, in the order drawn
    probs: Tensor | None  # (n, vocabulary) the draft distributions; None when all are greedy


class Growth:
    """The trees of one round, one for each of `sequences`.

    `cached[i]` says which nodes of tree i the draft model has read, and as the how-manieth token
    behind the committed text.
    """

    def __init__(self, context: DraftContext, sequences: Sequence[SlotState]) -> None:
        self.context, self.sequences = context, sequences
        self.trees = [TokenTree() for _ in sequences]
        self.cached: list[dict[int, int]] = [{} for _ in sequences]
        self._read: dict[int, list[int]] = {}  # the parents of what was read of each tree

    def read(self, wanted: Mapping[int, Sequence[int]]) -> Level:
        """Feed the draft model the nodes `wanted[i]` of tree i, in their order and parents first;
        or [ROOT], to begin with. What it has not read of the text goes before them."""
        feed, parents, places = [], [], []
        for i, nodes in wanted.items():
            tree, cached = self.trees[i], self.cached[i]
            text = [] if i in self._read else self.context.pending(self.sequences[i])
            own = self._read.setdefault(i, [])
            new = [node for node in nodes if node != ROOT]
            for node in new:
                parent = tree.parents[node]
                cached[node] = len(own)
                own.append(ROOT if parent == ROOT else cached[parent])
            feed.append(text + [tree.tokens[node] for node in new])
            parents.append(_behind(text, own) if text else own)
            places.append(range(len(feed[-1]) - len(nodes), len(feed[-1])))
            tree.draft_forwards += 1
            tree.draft_tokens += len(nodes)
        runner = self.context.runner
        rows = [self.sequences[i].slot for i in wanted]
        chains = all(own == list(range(-1, len(own) - 1)) for own in parents)
        logits = runner.forward(rows, feed, None if chains else parents)
        return Level(
            [i for i, nodes in wanted.items() for _ in nodes],
            [node for nodes in wanted.values() for node in nodes],
            _at(logits, places),
            None if runner.hidden is None else _at(runner.hidden, places),
        )

    def branch(self, level: Level, counts: Sequence[int], replacement: bool = False) -> Children:
        """Put `counts[n]` children behind place n of `level`: drawn from the draft distribution,
        fewer where it has fewer tokens and none is drawn twice; when greedy the most likely tokens.
        """
        at = self.places(level)
        children = at.siblings(counts, replacement)
        nodes = [
            [self.trees[i].add(token, parent, Origin.DRAFT, q) for token, q in own]
            for i, parent, own in zip(level.trees, level.nodes, children, strict=True)
        ]
        return Children(nodes, at.probs)

    def places(self, level: Level) -> Places:
        """The places of a level, in the texts that its trees go on."""
        owners = [self.sequences[i] for i in level.trees]
        positions = []
        for i, node, sequence in zip(level.trees, level.nodes, owners, strict=True):
            position = len(sequence.tokens)
            while node != ROOT:
                position, node = position + 1, self.trees[i].parents[node]
            positions.append(position)
        return Places(
            [sequence.sampling for sequence in owners],
            [sequence.random for sequence in owners],
            positions,
            level.logits,
            lambda: level.logits.argmax(dim=-1),
        )


def _behind(text: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The parents when the tree is fed together with the end of the text before it."""
    last = len(text) - 1
    return [*range(-1, last), *(parent + len(text) for parent in parents)]


def _at(states: Tensor, places: Sequence[range]) -> Tensor:
    """The entries (n, …) at each row's own places of `states` (rows, width, …)."""
    if all(own == range(states.shape[1]) for own in places):
        return states.flatten(0, 1)
    rows = [row for row, own in enumerate(places) for _ in own]
    return states[rows, [place for own in places for place in own]]
