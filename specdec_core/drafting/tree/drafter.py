"""Multi-candidate speculative decoding: a draft model grows a static tree (MCSD; Sequoia)."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from specdec_core.drafting.context import DraftContext
from specdec_core.drafting.drafter import Outcome, Resources, SlotState
from specdec_core.drafting.growing import Growth
from specdec_core.drafting.recorded import ShapedTree
from specdec_core.drafting.tree.settings import TreeSettings
from specdec_core.tokens.token_tree import ROOT, TokenTree
from specdec_core.tokens.topology import static_tree


class TreeDrafter(ShapedTree):
    """Grows the same tree every round, cut where the request ends. It grows on after a token that
    would end the sequence, so that its shape does not depend on what is drafted.

    Under sampling a node has fewer children than in the shape where fewer tokens have any
    probability.
    """

    def __init__(self, settings: TreeSettings, resources: Resources) -> None:
        self.settings = settings
        self.clock = resources.clock
        self.context = DraftContext(resources.draft_runner(settings.draft))
        parents = static_tree(settings.children)
        self.shapes = [parents]
        self._children: dict[int, list[int]] = {}  # of the shape's inner nodes
        for node, parent in enumerate(parents):
            self._children.setdefault(parent, []).append(node)
        # The draft model reads these, and no leaves.
        read = {node: n - 1 for n, node in enumerate(self._children)}
        self.context.runner.expect([read[parents[node]] for node in read if node != ROOT])
        self._cached: dict[int, dict[int, int]] = {}

    @torch.inference_mode()
    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        growth = Growth(self.context, sequences)
        shapes = [{ROOT: ROOT} for _ in sequences]  # which of the shape's nodes each node is
        ends = [[ROOT] for _ in sequences]
        for depth in range(self.settings.depth):
            wanted = {
                i: [node for node in ends[i] if shapes[i][node] in self._children]
                for i, sequence in enumerate(sequences)
                if depth < self.context.room(sequence)
            }
            wanted = {i: nodes for i, nodes in wanted.items() if nodes}
            if not wanted:
                break
            level = growth.read(wanted)
            returned = perf_counter()
            places = zip(level.trees, level.nodes, strict=True)
            planned = [self._children[shapes[i][node]] for i, node in places]
            children = growth.branch(level, list(map(len, planned)), self.settings.replacement)
            ends = [[] for _ in sequences]
            for i, shape, nodes in zip(level.trees, planned, children.nodes, strict=True):
                shapes[i].update(zip(nodes, shape, strict=False))
                ends[i] += nodes
            self.clock.chose(returned, level.logits)
        for sequence, cached in zip(sequences, growth.cached, strict=True):
            self._cached[sequence.slot] = cached
        return growth.trees

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        self.context.keep(sequence, outcome, self._cached[sequence.slot])
