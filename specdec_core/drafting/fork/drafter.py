"""Fork-shaped trees: several chains side by side, as deep as a length policy lets them be (improved
MCSD, §3.2 and §3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from time import perf_counter

import torch

from specdec_core.drafting.context import DraftContext
from specdec_core.drafting.drafter import Outcome, Resources, SlotState
from specdec_core.drafting.fork.settings import ForkSettings
from specdec_core.drafting.growing import Children, Growth, Level
from specdec_core.drafting.policies.policy import PolicyOutcome
from specdec_core.drafting.policies.signals import Signals
from specdec_core.drafting.recorded import ShapedTree
from specdec_core.tokens.token_tree import ROOT, TokenTree
from specdec_core.tokens.topology import fork


class ForkDrafter(ShapedTree):
    """Draws the first candidates of `width` branches, then one more for every branch, until the
    policy would stop all of them.

    Each branch is a slot of its own to the policy. A policy that learns from its candidates
    observes the outcome of each branch; one that learns from rounds, the outcome of the fork.
    """

    def __init__(self, settings: ForkSettings, resources: Resources) -> None:
        self.settings = settings
        runner = resources.draft_runner(settings.draft)
        self.context = DraftContext(runner)
        self.policy = resources.policy(settings.draft, settings.policy)
        self.clock = resources.clock
        if self.policy.needs_hidden:
            runner.watch_hidden(True)
        self.shapes = [fork(settings.width, settings.depth)]
        runner.expect(self.shapes[0][: -settings.width])  # the last level is not read
        self._cached: dict[int, dict[int, int]] = {}

    def open(self, sequences: Sequence[SlotState]) -> None:
        for sequence in sequences:
            for branch in self._branches(sequence):
                self.policy.reset(branch)

    @torch.inference_mode()
    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        growth = Growth(self.context, sequences)
        limits = [
            min(s.room, max(self.policy.limit(branch, s.batch) for branch in self._branches(s)))
            for s in sequences
        ]
        ends = {i: [ROOT] for i, limit in enumerate(limits) if limit > 0}
        depth = 0
        while ends:
            counts = [1 if depth else self.settings.width for row in ends.values() for _ in row]
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
        """Which of the `open_ended` trees go on: those with a branch that the policy would not
        stop. A policy that learns sees the other trees' candidates as well."""
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
        if not len(tree):
            return
        if not self.policy.learns:
            accepted = [outcome.accepted] * len(slots)
        else:
            accepted = [0] * tree.parents.count(ROOT)
            if outcome.path:
                accepted[outcome.path[0]] = outcome.accepted
        for slot, count in zip(slots, accepted, strict=False):
            self.policy.observe(slot, PolicyOutcome(tree.depth, count, tree.draft_forwards))

    def _branches(self, sequence: SlotState) -> range:
        """The policy's slots of the branches of a slot."""
        first = sequence.slot * self.settings.width
        return range(first, first + self.settings.width)
