"""Target-initialised multi-candidate trees: the target begins them (improved MCSD, §3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from specdec_core.drafting.context import DraftContext
from specdec_core.drafting.drafter import Outcome, Resources, SlotState
from specdec_core.drafting.growing import Growth
from specdec_core.drafting.target_started import TargetStarted
from specdec_core.drafting.target_tree.settings import TargetTreeSettings
from specdec_core.tokens.token_tree import TokenTree
from specdec_core.tokens.topology import k_configuration


class TargetTreeDrafter(TargetStarted):
    """The first level are the `branching[0]` tokens that the target drew for the next position, one
    of which is always accepted. Each has a subtree of the draft's, of `branching[1:]` children. In
    a request's first round, which has no candidates, the target only draws.

    Like any static tree it grows on after a token that would end the sequence: such a token must
    not lose against other tokens because it has no candidates.
    """

    def __init__(self, settings: TargetTreeSettings, resources: Resources) -> None:
        self.settings = settings
        self.clock = resources.clock
        self.width, self._starts = settings.branching[0], {}
        self.shapes = [k_configuration(settings.branching)]
        self.context = DraftContext(resources.draft_runner(settings.draft))
        self.context.runner.expect(k_configuration(settings.branching[:-1]))  # leaves are not read
        self._cached: dict[int, dict[int, int]] = {}

    @torch.inference_mode()
    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        growth = Growth(self.context, sequences)
        ends = {
            i: self.begin(tree, sequence)
            for i, (tree, sequence) in enumerate(zip(growth.trees, sequences, strict=True))
        }
        rooms = [self.context.room(sequence, begun=True) for sequence in sequences]
        for depth, count in enumerate(self.settings.branching[1:]):
            wanted = {i: nodes for i, nodes in ends.items() if nodes and depth < rooms[i]}
            if not wanted:
                break
            level = growth.read(wanted)
            returned = perf_counter()
            counts = [count] * len(level.nodes)
            children = growth.branch(level, counts, self.settings.replacement)
            ends = {i: [] for i in wanted}
            for i, nodes in zip(level.trees, children.nodes, strict=True):
                ends[i] += nodes
            self.clock.chose(returned, level.logits)
        for sequence, cached in zip(sequences, growth.cached, strict=True):
            self._cached[sequence.slot] = cached
        return growth.trees

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        self.context.keep(sequence, outcome, self._cached[sequence.slot])
