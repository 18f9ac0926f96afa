"""A draft model's chain that a lookup guesses."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_core.drafting.cascade.settings import CascadeSettings
from specdec_core.drafting.chain import ChainDrafter
from specdec_core.drafting.drafter import Outcome, Resources, SlotState
from specdec_core.tokens.token_tree import TokenTree


class CascadeDrafter(ChainDrafter):
    """Guesses by a lookup; the draft model verifies them, and the target the draft model's
    chain."""

    def __init__(self, settings: CascadeSettings, resources: Resources) -> None:
        super().__init__(settings.draft, settings.policy, resources)
        self.proposer = resources.lookup(settings.proposer)

    def guess(self, sequence: SlotState, drafted: Sequence[int], room: int) -> TokenTree:
        return self.proposer.find(sequence, drafted, room).tree

    def open(self, sequences: Sequence[SlotState]) -> None:
        super().open(sequences)
        self.proposer.open(sequences)

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        super().observe(sequence, outcome)
        self.proposer.observe(sequence, outcome)

    def missed(self, sequence: SlotState) -> None:
        super().missed(sequence)
        self.proposer.missed(sequence)

    def close(self, sequence: SlotState) -> None:
        super().close(sequence)
        self.proposer.close(sequence)
