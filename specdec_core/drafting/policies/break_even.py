"""Draft while another candidate is worth the step that it costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specdec_core.config import MOST_TOKENS, CandidateCost, Costs, MaxTokens, PricedSettings
from specdec_core.drafting.policies.policy import LengthPolicy, PolicyOutcome

if TYPE_CHECKING:
    from specdec_core.drafting.policies.signals import Signals

# What every request begins with: candidates that are accepted with this probability,
_ACCEPTED = 0.7
_ROUNDS = 4  # as if this number of rounds had shown it,
_AGREED = 4.0  # and confidences that this number of accepted candidates agrees with.


def best_rate(acceptance: float, target_cost: float, max_tokens: int) -> float:
    """Tokens a candidate's time of the best constant length, where every candidate is accepted with
    probability `acceptance`: the largest (1 + a + … + a^K) / (c + K)."""
    tokens, best = 1.0, 1 / target_cost
    for length in range(1, max_tokens + 1):
        tokens += acceptance**length
        best = max(best, tokens / (target_cost + length))
    return best


class BreakEvenSettings(PricedSettings):
    """Stop when another candidate is expected to add fewer tokens than decoding adds in the time
    that the candidate takes, by the request's own rounds."""

    kind: Literal["break_even"] = "break_even"
    target_cost: CandidateCost = "profile"
    max_tokens: MaxTokens = MOST_TOKENS

    def cost_by(self, costs: Costs, draft: str | None) -> float:
        return costs.target_in_candidates(draft)

    @property
    def label(self) -> str:
        return f"break-even{self.costing(' {:g}')}{self.up_to}"


@dataclass(slots=True)
class _Request:
    """What a request's rounds have added and cost, and how far its confidences were right."""

    tokens: float
    cost: float  # candidates, a target forward counting as `target_cost` of them
    accepted: float = _AGREED
    promised: float = _AGREED  # accepted candidates, by the products of confidences
    product: float = 1.0  # of the round in progress
    round: float = 0.0  # promised by the round in progress


class BreakEvenPolicy(LengthPolicy):
    """Draft on after candidate n while r · Π q(y) ≥ g.

    Decoding is a renewal process: a round adds accepted + 1 tokens and costs c + calls, in what a
    candidate takes, a call of the draft model and a place in the target's forward. The most tokens
    a time are had by taking every candidate that adds more than the rate itself, g = Σ (accepted +
    1) / Σ (c + calls): a candidate adds a token with at most the probability that those before it
    are all accepted. That is Π q(y) as far as the draft's confidences are right; r = Σ accepted / Σ
    Π q(y) of the candidates so far is how far they are. So the threshold on the product follows
    the sequence and the costs, and nothing is to be chosen. A candidate that a guess adds takes no
    call and is always taken.

    Both sums are the request's own. They begin as if a few rounds of the best constant length had
    been seen, with candidates of one acceptance (:func:`best_rate`).
    """

    settings: BreakEvenSettings
    learns = True
    reads = ("probability",)

    def __init__(self, settings: BreakEvenSettings) -> None:
        super().__init__(settings)
        cost = _ROUNDS * settings.cost
        rate = best_rate(_ACCEPTED, settings.cost, settings.max_tokens)
        self._requests = defaultdict[int, _Request](lambda: _Request(cost * rate, cost))

    def threshold(self, slot: int) -> float:
        """The product of confidences below which `slot` stops, g / r."""
        request = self._requests[slot]
        return request.tokens / request.cost * request.promised / request.accepted

    def go_on(self, signals: Signals) -> Sequence[bool]:
        answers = []
        for slot, position, probability, free in zip(
            signals.slots, signals.positions, signals.probability, signals.free, strict=True
        ):
            request = self._requests[slot]
            if position == 1:
                request.product, request.round = 1.0, 0.0
            request.product *= probability
            request.round += request.product
            answers.append(free or request.product >= self.threshold(slot))
        return answers

    def observe(self, slot: int, outcome: PolicyOutcome) -> None:
        request = self._requests[slot]
        request.tokens += outcome.accepted + 1 + outcome.reused
        request.cost += self.settings.cost + outcome.draft_calls
        request.accepted += outcome.accepted
        request.promised += request.round
        request.product, request.round = 1.0, 0.0

    def reset(self, slot: int) -> None:
        self._requests.pop(slot, None)
