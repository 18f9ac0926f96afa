"""A small language model drafts a chain, one forward pass a token, until the policy says stop."""

from __future__ import annotations

from specdec_core.drafting.chain import ChainDrafter
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.drafter import Resources
from specdec_core.drafting.recorded import KnownRounds, RecordedResources


class DraftModelDrafter(ChainDrafter):
    """Drafts chains from a draft of the pair."""

    guesses = False

    def __init__(self, settings: DraftModelSettings, resources: Resources) -> None:
        super().__init__(settings.draft, settings.policy, resources)

    @classmethod
    def recorded_rounds(
        cls, settings: DraftModelSettings, recorded: RecordedResources
    ) -> KnownRounds | None:
        lengths = recorded.lengths(settings.draft, settings.policy)
        return None if lengths is None else recorded.track(settings.draft).chains(lengths)
