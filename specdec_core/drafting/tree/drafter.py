"""A draft model grows a tree of one shape: multi-candidate speculative decoding (MCSD; Sequoia),
and chains side by side, as deep as a length policy lets them be (improved MCSD, §3.2 and §3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from specdec_core.drafting.context import DraftContext
from specdec_core.drafting.drafter import Drafter, Outcome, Resources, SlotState
from specdec_core.drafting.growing import Growth, Level
from specdec_core.drafting.policies.policy import LengthPolicy, PolicyOutcome
from specdec_core.drafting.policies.signals import Signals
from specdec_core.drafting.recorded import KnownRounds, RecordedResources
from specdec_core.tokens.token_tree import ROOT, TokenTree
from specdec_core.tokens.topology import after_text, static_tree


class TreeDrafter(Drafter):
    """Grows the tree of `settings.children`, cut where the request ends and, if there is a length
    policy, at the level after which the policy would stop every branch.

    The tree also grows after a token that would end the sequence, so that its shape does not depend
    on the tokens. Under sampling a node has fewer children than in the shape where fewer tokens
    have any probability.

    Each branch is a separate slot to the policy. A policy that learns from its candidates observes
    the outcome of each branch; a policy that learns from rounds, the outcome of the tree.
    """

    policy: LengthPolicy | None = None

    def __init__(self, settings: Any, resources: Resources) -> None:
        self.settings = settings
        self.clock = resources.clock
        runner = resources.draft_runner(settings.draft)
        self.context = DraftContext(runner)
        if settings.policies:
            self.policy = resources.policy(settings.draft, settings.policy)
        parents = static_tree(settings.children)
        self.shapes = [after_text(1, parents)]
        self._children: dict[int, list[int]] = {}  # of the shape's inner nodes
        for node, parent in enumerate(parents):
            self._children.setdefault(parent, []).append(node)
        # The draft model reads these, and no leaves.
        read = {node: n - 1 for n, node in enumerate(self._children)}
        runner.expect([read[parents[node]] for node in read if node != ROOT])
        self._cached: dict[int, dict[int, int]] = {}

    @classmethod
    def recorded_rounds(cls, settings: Any, recorded: RecordedResources) -> KnownRounds | None:
        # When greedy, the children are the draft model's most likely tokens: their ranks are
        # recorded.
        return recorded.track(settings.draft).trees(settings.children)

    def begin(self, tree: TokenTree, sequence: SlotState) -> list[int]:
        """The nodes of an empty tree after which the draft model begins; they are added to it,
        numbered as in the shape."""
        return [ROOT]

    def open(self, sequences: Sequence[SlotState]) -> None:
        if self.policy is not None:
            for sequence in sequences:
                for branch in self._branches(sequence):
                    self.policy.reset(branch)

    @torch.inference_mode()
    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        growth = Growth(self.context, sequences)
        trees = zip(growth.trees, sequences, strict=True)
        ends = {i: self.begin(tree, sequence) for i, (tree, sequence) in enumerate(trees)}
        shapes = [{node: node for node in ends[i]} for i in ends]  # by tree: nodes of the shape
        limits = [
            min(self.context.room(sequence, tree.begun > 0), self._limit(sequence))
            for tree, sequence in zip(growth.trees, sequences, strict=True)
        ]
        depth = 0
        while True:
            wanted = {
                i: [node for node in nodes if shapes[i][node] in self._children]
                for i, nodes in ends.items()
                if depth < limits[i]
            }
            wanted = {i: nodes for i, nodes in wanted.items() if nodes}
            if not wanted:
                break
            level = growth.read(wanted)
            returned = perf_counter()
            places = zip(level.trees, level.nodes, strict=True)
            planned = [self._children[shapes[i][node]] for i, node in places]
            children = growth.branch(level, list(map(len, planned)), self.settings.replacement)
            depth += 1
            ends = {i: [] for i in wanted}
            for i, shape, nodes in zip(level.trees, planned, children, strict=True):
                shapes[i].update(zip(nodes, shape, strict=False))
                ends[i] += nodes
            if self.policy is not None:
                open_ended = {i for i in ends if depth < limits[i]}
                going = self._go_on(self.policy, growth, level, children, depth, open_ended)
                ends = {i: nodes for i, nodes in ends.items() if i in going}
            self.clock.chose(returned, self.context.runner.device)
        for sequence, cached in zip(sequences, growth.cached, strict=True):
            self._cached[sequence.slot] = cached
        return growth.trees

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        tree = outcome.tree
        self.context.keep(sequence, outcome, self._cached[sequence.slot])
        if self.policy is None or not tree:
            return
        begun = int(tree.begun > 0)
        first = [node for node, depth in enumerate(tree.depths()) if depth == begun]
        path, slots = outcome.path[begun:], self._branches(sequence)
        if not first:
            return
        if not self.policy.learns:
            accepted = [len(path)] * len(slots)
        else:
            accepted = [0] * len(first)
            if path:
                accepted[first.index(path[0])] = len(path)
        for slot, count in zip(slots, accepted, strict=False):
            result = PolicyOutcome(tree.depth - begun, count, tree.draft_forwards)
            self.policy.observe(slot, result)

    def _limit(self, sequence: SlotState) -> int:
        """The most levels that the policy allows for in the coming round."""
        if self.policy is None:
            return int(self.settings.depth)
        limits = (self.policy.limit(b) for b in self._branches(sequence))
        return max(limits)

    def _go_on(
        self,
        policy: LengthPolicy,
        growth: Growth,
        level: Level,
        children: Sequence[Sequence[int]],
        depth: int,
        open_ended: set[int],
    ) -> set[int]:
        """The `open_ended` trees that grow further: those with a branch that the policy does not
        stop. A policy that learns sees the candidates of the other trees as well."""
        shown: list[tuple[int, int, int, int]] = []
        branches = [iter(self._branches(sequence)) for sequence in growth.sequences]
        for place, (i, nodes) in enumerate(zip(level.trees, children, strict=True)):
            if i in open_ended or policy.learns:
                tokens = growth.trees[i].tokens
                shown += [(i, place, next(branches[i]), tokens[node]) for node in nodes]
        if not shown:
            return set()
        trees, places, slots, drawn = map(list, zip(*shown, strict=True))
        at, depths = level.at, [depth] * len(slots)
        signals = Signals(slots, drawn, depths, at.logits, at.probs, level.hidden, places)
        answers = zip(trees, policy.go_on(signals), strict=True)
        return {i for i, go in answers if go and i in open_ended}

    def _branches(self, sequence: SlotState) -> range:
        """The policy's slots of the branches of a slot."""
        count = self.settings.branches
        return range(sequence.slot * count, (sequence.slot + 1) * count)


class ForkDrafter(TreeDrafter):
    """Chains that part at the first token."""
