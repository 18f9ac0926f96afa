"""The draft length that grows after full acceptance and shrinks otherwise."""

from __future__ import annotations

from specdec_core.config import HeuristicPolicy
from specdec_core.drafting.policies.policy import LengthPolicy, PolicyOutcome


class Heuristic(LengthPolicy):
    """K ← K + increase when all candidates were accepted, K ← K − decrease otherwise, at least 1.

    The rule of transformers' `AssistedCandidateGenerator`. Transient, every request begins with
    `start` (its "heuristic_transient"); lasting, a slot's K goes on into its next request (its
    "heuristic"). Each slot has a K of its own, so that nobody's drafts depend on who shares the
    batch. Unlike there, K never exceeds `max_tokens`, and what a request's last round would have
    changed is not carried over, because that round is cut by the end of the text.
    """

    settings: HeuristicPolicy

    def __init__(self, settings: HeuristicPolicy) -> None:
        super().__init__(settings)
        self._lengths: dict[int, int] = {}

    def limit(self, slot: int, batch: int = 1) -> int:
        return self._lengths.get(slot, min(self.settings.start, self.settings.max_tokens))

    def observe(self, slot: int, outcome: PolicyOutcome) -> None:
        everything = outcome.accepted == outcome.drafted
        change = self.settings.increase if everything else -self.settings.decrease
        self._lengths[slot] = min(max(self.limit(slot) + change, 1), self.settings.max_tokens)

    def reset(self, slot: int) -> None:
        if self.settings.transient:
            self._lengths.pop(slot, None)
