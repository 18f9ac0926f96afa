"""Target-initialised trees of dynamic depth: improved MCSD's framework as a whole (§3)."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_core.drafting.drafter import Resources, SlotState
from specdec_core.drafting.fork.drafter import ForkBranches
from specdec_core.drafting.growing import Growth
from specdec_core.drafting.target_fork.settings import TargetForkSettings
from specdec_core.drafting.target_started import TargetStarted
from specdec_core.tokens.token_tree import ROOT, TokenTree
from specdec_core.tokens.topology import k_configuration


class TargetForkDrafter(ForkBranches, TargetStarted):
    """The target's tokens for the next position, each followed by
    `spread` chains of the draft's. In a request's first round, which has no candidates, the target
    only draws.

    With one token to begin with the output is lossless: how long the chains grow depends on draft
    tokens alone.
    """

    settings: TargetForkSettings
    begun = 1

    def __init__(self, settings: TargetForkSettings, resources: Resources) -> None:
        super().__init__(settings, resources)
        self.width, self._starts = settings.width, {}

    def open(self, sequences: Sequence[SlotState]) -> None:
        ForkBranches.open(self, sequences)
        TargetStarted.open(self, sequences)

    @property
    def first(self) -> int:
        return self.settings.spread

    def shape(self) -> list[int]:
        settings = self.settings
        return k_configuration([settings.width, settings.spread, *[1] * (settings.depth - 1)])

    def roots(self, growth: Growth, i: int) -> list[int]:
        return self.begin(growth.trees[i], growth.sequences[i])

    def first_candidates(self, tree: TokenTree) -> list[int]:
        begun = {node for node, parent in enumerate(tree.parents) if parent == ROOT}
        return [node for node, parent in enumerate(tree.parents) if parent in begun]
