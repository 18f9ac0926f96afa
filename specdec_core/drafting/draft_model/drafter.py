"""A small language model drafts a chain until the policy stops it."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_core.drafting.chain import ChainDrafter
from specdec_core.drafting.draft_model.settings import CascadeSettings, DraftModelSettings
from specdec_core.drafting.drafter import Resources, SlotState
from specdec_core.drafting.recorded import KnownRounds, RecordedResources
from specdec_core.tokens.token_tree import TokenTree


class DraftModelDrafter(ChainDrafter):
    """Drafts chains from a draft of the pair, one forward pass a token."""

    guesses = False

    @classmethod
    def recorded_rounds(
        cls, settings: DraftModelSettings, recorded: RecordedResources
    ) -> KnownRounds | None:
        lengths = recorded.lengths(settings.draft, settings.policy)
        return None if lengths is None else recorded.track(settings.draft).chains(lengths)


class CascadeDrafter(ChainDrafter):
    """A lookup guesses the chain's tokens; the draft model verifies the guesses, and the target the
    draft model's chain."""

    def __init__(self, settings: CascadeSettings, resources: Resources) -> None:
        super().__init__(settings, resources)
        self.proposer = resources.lookup(settings.proposer)
        self.parts = (self.proposer,)

    def guess(self, sequence: SlotState, drafted: Sequence[int], room: int) -> TokenTree:
        return self.proposer.find(sequence, drafted, room).tree
