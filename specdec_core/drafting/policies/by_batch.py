"""The draft length that follows how many requests are decoded together."""

from __future__ import annotations

from specdec_core.config import ByBatchPolicy
from specdec_core.drafting.policies.policy import LengthPolicy


class ByBatch(LengthPolicy):
    """K by the number of requests in the round. What is drafted for a request then depends on who
    shares its batch, but neither its greedy output does, nor the distribution of a sampled one."""

    settings: ByBatchPolicy

    def __init__(self, settings: ByBatchPolicy) -> None:
        super().__init__(settings)
        self.rests = 0 in settings.tokens.values()

    def limit(self, slot: int, batch: int = 1) -> int:
        return self.settings.at(batch)
