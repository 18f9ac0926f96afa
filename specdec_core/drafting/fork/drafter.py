"""Fork-shaped trees: several chains side by side, as deep as a length policy lets them be (improved
MCSD, §3.2 and §3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from time import perf_counter
from typing import Any

import torch

from specdec_core.drafting.context import DraftContext
from specdec_core.drafting.drafter import Drafter, Outcome, Resources, SlotState
from specdec_core.drafting.fork.settings import ForkSettings
from specdec_core.drafting.growing import Children, Growth, Level
from specdec_core.drafting.policies.policy import PolicyOutcome
from specdec_core.drafting.policies.signals import Signals
from specdec_core.drafting.recorded import ShapedTree
from specdec_core.tokens.token_tree import ROOT, TokenTree
from specdec_core.tokens.topology import fork


class ForkBranches(Drafter):
    """Draws the first candidates of `settings.branches` branches, then one more for every branch,
    until the policy would stop all of them.

    Each branch is a separate slot to the policy. A policy that learns from its candidates
    observes the outcome of each branch; one that learns from rounds, the outcome of the tree.
    """

    begun = 0  # levels of the tree that are not the draft's

    def __init__(self, settings: Any, resources: Resources) -> None:
        self.settings = settings
        runner = resources.draft_runner(settings.draft)
        self.context = DraftContext(runner)
        self.policy = resources.policy(settings.draft, settings.policy)
        self.clock = resources.clock
        if self.policy.needs_hidden:
            runner.watch_hidden(True)
        self.shapes = [self.shape()]
        runner.expect(self.shapes[0][: -settings.branches])  # the last level is not read
        self._cached: dict[int, dict[int, int]] = {}

    @property
    def first(self) -> int:
        """The first candidates at each of the places where branches begin."""
        raise NotImplementedError

    def shape(self) -> list[int]:
        """The parents of the whole tree."""
        raise NotImplementedError

    def roots(self, growth: Growth, i: int) -> list[int]:
        """The places in tree i where branches begin; nodes that are not the draft's are added."""
        raise NotImplementedError

    def first_candidates(self, tree: TokenTree) -> list[int]:
        """The branches' first candidates in the finished tree."""
        raise NotImplementedError

    def open(self, sequences: Sequence[SlotState]) -> None:
        for sequence in sequences:
            for branch in self._branches(sequence):
                self.policy.reset(branch)

    @torch.inference_mode()
    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        growth = Growth(self.context, sequences)
        limits = [
            min(
                self.context.room(s, bool(self.begun)),
                max(self.policy.limit(branch, s.batch) for branch in self._branches(s)),
            )
            for s in sequences
        ]
        roots = {i: self.roots(growth, i) for i in range(len(limits))}
        ends = {i: nodes for i, nodes in roots.items() if nodes and limits[i] > 0}
        depth = 0
        while ends:
            counts = [1 if depth else self.first for row in ends.values() for _ in row]
            level = growth.read(ends)
            returned = perf_counter()
            children = growth.branch(level, counts, self.settings.replacement)
            depth += 1
            ends = {i: [] for i in ends}
            for i, nodes in zip(level.trees, children.nodes, strict=True):
                ends[i] += nodes
            open_ended = {i for i in ends if depth < limits[i]}
            unfinished = self._go_on(growth, level, children, depth, open_ended)
            ends = {i: nodes for i, nodes in ends.items() if i in unfinished}
            self.clock.chose(returned, level.logits)
        for sequence, cached in zip(sequences, growth.cached, strict=True):
            self._cached[sequence.slot] = cached
        return growth.trees

    def _go_on(
        self, growth: Growth, level: Level, children: Children, depth: int, open_ended: set[int]
    ) -> set[int]:
        """The `open_ended` trees that are drafted further: those with a branch that the policy does
        not stop. A policy that learns sees the other trees' candidates as well."""
        slots: list[int] = []
        tokens: list[int] = []
        places: list[int] = []
        trees: list[int] = []
        branches = [iter(self._branches(sequence)) for sequence in growth.sequences]
        for place, (i, nodes) in enumerate(zip(level.trees, children.nodes, strict=True)):
            if i in open_ended or self.policy.learns:
                slots += islice(branches[i], len(nodes))
                tokens += [growth.trees[i].tokens[node] for node in nodes]
                places += [place] * len(nodes)
                trees += [i] * len(nodes)
        if not slots:
            return set()
        pick = slice(None) if places == list(range(len(level.nodes))) else places
        signals = Signals(
            slots,
            tokens,
            [depth] * len(slots),
            level.logits[pick],
            None if children.probs is None else children.probs[pick],
            None if level.hidden is None else level.hidden[pick],
        )
        answers = zip(trees, self.policy.go_on(signals), strict=True)
        return {i for i, go in answers if go and i in open_ended}

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        self.context.keep(sequence, outcome, self._cached[sequence.slot])
        tree, slots = outcome.tree, self._branches(sequence)
        first, path = self.first_candidates(tree), outcome.path[self.begun :]
        if not first:
            return
        if not self.policy.learns:
            accepted = [len(path)] * len(slots)
        else:
            accepted = [0] * len(first)
            if path:
                accepted[first.index(path[0])] = len(path)
        for slot, count in zip(slots, accepted, strict=False):
            drafted = tree.depth - self.begun
            self.policy.observe(slot, PolicyOutcome(drafted, count, tree.draft_forwards))

    def _branches(self, sequence: SlotState) -> range:
        """The policy's slots of the branches of a slot."""
        count = self.settings.branches
        return range(sequence.slot * count, (sequence.slot + 1) * count)


class ForkDrafter(ForkBranches, ShapedTree):
    """Branches that part at the first token."""

    settings: ForkSettings

    @property
    def first(self) -> int:
        return self.settings.width

    def shape(self) -> list[int]:
        return fork(self.settings.width, self.settings.depth)

    def roots(self, growth: Growth, i: int) -> list[int]:
        return [ROOT]

    def first_candidates(self, tree: TokenTree) -> list[int]:
        return [node for node, parent in enumerate(tree.parents) if parent == ROOT]
