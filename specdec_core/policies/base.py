"""What a length policy sees and answers, and the policy for each configuration."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from specdec_core.config import (
    ConfidencePolicy,
    FixedPolicy,
    HeuristicPolicy,
    Policy,
    SvipPolicy,
)


class Signals:
    """What is known when one candidate token has been drafted for each of some slots.

    `slots` (n,) says whose; `logits` (n, vocabulary) and, under sampling, `probs` are what the
    tokens were drawn from. Entropies and peaks are computed only when a policy asks for them.
    """

    def __init__(
        self, slots: Sequence[int], tokens: Sequence[int], logits: Tensor, probs: Tensor | None
    ) -> None:
        self.slots, self.tokens, self.logits = slots, tokens, logits
        self._probs = probs

    @cached_property
    def probs(self) -> Tensor:
        """The draft distribution (n, vocabulary); at temperature 1 when decoding is greedy."""
        return self.logits.float().softmax(dim=-1) if self._probs is None else self._probs

    @cached_property
    def top_probability(self) -> list[float]:
        """The draft's confidence (n,): the largest probability of the distribution."""
        return self.probs.amax(dim=-1).tolist()

    @cached_property
    def entropy(self) -> list[float]:
        """Entropies (n,) in nats."""
        return torch.special.entr(self.probs).sum(dim=-1).tolist()


class LengthPolicy:
    """Answers for all slots at once, and may learn from a round's outcome."""

    def __init__(self, settings: Policy) -> None:
        self.settings = settings

    def limit(self, slot: int) -> int:
        """Candidate tokens in the coming round of `slot` at most."""
        return self.settings.max_tokens

    def go_on(self, signals: Signals) -> Sequence[bool]:
        """For each slot, whether to draft another candidate."""
        return [True] * len(signals.slots)

    def observe(self, slot: int, drafted: int, accepted: int) -> None:
        """A round of `slot` was verified."""

    def reset(self, slot: int) -> None:
        """`slot` begins a new request."""


class Heuristic(LengthPolicy):
    """K ← K + increase when all candidates were accepted, K − decrease otherwise, for each request
    by itself (the rule of transformers' assisted generation)."""

    def __init__(self, settings: HeuristicPolicy) -> None:
        super().__init__(settings)
        self._lengths: dict[int, int] = {}

    def limit(self, slot: int) -> int:
        return self._lengths.get(slot, min(self.settings.start, self.settings.max_tokens))

    def observe(self, slot: int, drafted: int, accepted: int) -> None:
        change = self.settings.increase if accepted == drafted else -self.settings.decrease
        self._lengths[slot] = min(max(self.limit(slot) + change, 1), self.settings.max_tokens)

    def reset(self, slot: int) -> None:
        self._lengths.pop(slot, None)


class Confidence(LengthPolicy):
    """Stop behind a token whose distribution peaks below the threshold."""

    def go_on(self, signals: Signals) -> Sequence[bool]:
        return [top >= self.settings.threshold for top in signals.top_probability]


class Svip(LengthPolicy):
    """Stop behind a token whose distribution has √H > h (SVIP, Eq. 7)."""

    def go_on(self, signals: Signals) -> Sequence[bool]:
        squared = self.settings.threshold**2
        return [entropy <= squared for entropy in signals.entropy]


_POLICIES: dict[type[Policy], type[LengthPolicy]] = {
    FixedPolicy: LengthPolicy,
    HeuristicPolicy: Heuristic,
    ConfidencePolicy: Confidence,
    SvipPolicy: Svip,
}


def build_policy(settings: Policy) -> LengthPolicy:
    """The policy that `settings` describe."""
    return _POLICIES[type(settings)](settings)
