"""The draft length that grows after full acceptance and shrinks otherwise."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from specdec_core.config import MOST_TOKENS, MaxTokens, PolicySettings
from specdec_core.drafting.policies.policy import LengthPolicy, PolicyOutcome


class HeuristicSettings(PolicySettings):
    """K grows by `increase` when everything was accepted and shrinks by `decrease` otherwise."""

    kind: Literal["heuristic"] = "heuristic"
    start: MaxTokens = Field(default=5, description="K of the first round")
    increase: int = Field(default=2, ge=0)
    decrease: int = Field(default=1, ge=0)
    transient: bool = Field(
        default=True, description="every request begins with `start`; else K is carried over"
    )
    max_tokens: MaxTokens = MOST_TOKENS

    replayed: ClassVar = True

    @property
    def remembers(self) -> bool:
        return not self.transient

    @property
    def label(self) -> str:
        name = "heuristic" if self.transient else "lasting heuristic"
        return f"{name} {self.start}{self.up_to}"


class HeuristicPolicy(LengthPolicy):
    """K ← K + increase when all candidates were accepted, K ← K − decrease otherwise, at least 1.

    The rule of transformers' `AssistedCandidateGenerator`. Transient, every request begins with
    `start` (its "heuristic_transient"). Lasting, a slot keeps its K for the next request (its
    "heuristic"). Each slot has its own K, so that a request's drafts do not depend on the rest of
    the batch. Unlike in transformers, K never exceeds `max_tokens`, and the last round of a request
    does not change K, because it is cut by the end of the sequence.
    """

    settings: HeuristicSettings

    def __init__(self, settings: HeuristicSettings) -> None:
        super().__init__(settings)
        self._lengths: dict[int, int] = {}

    def limit(self, slot: int) -> int:
        return self._lengths.get(slot, min(self.settings.start, self.settings.max_tokens))

    def observe(self, slot: int, outcome: PolicyOutcome) -> None:
        everything = outcome.accepted == outcome.drafted
        change = self.settings.increase if everything else -self.settings.decrease
        self._lengths[slot] = min(max(self.limit(slot) + change, 1), self.settings.max_tokens)

    def reset(self, slot: int) -> None:
        if self.settings.transient:
            self._lengths.pop(slot, None)
