"""The policy that drafts while a candidate is worth its step."""

import numpy as np
import pytest
import torch

from specdec_core.base.errors import UserError
from specdec_core.drafting.policies.break_even import BreakEvenPolicy, BreakEvenSettings, best_rate
from specdec_core.drafting.policies.policy import PolicyOutcome
from specdec_core.drafting.policies.signals import Signals

MOST = 20
TOKENS = 4_000


class Text:
    """A draft's confidences behind every token, and whether its candidates are accepted: with
    probability q^`power`, so that a power other than 1 makes the draft too sure, or too modest."""

    def __init__(self, power, seed):
        rng = np.random.default_rng(seed)
        # How sure a draft is comes in stretches.
        level = np.repeat(rng.uniform(0.4, 4, TOKENS // 40), 40)
        self.q = rng.beta(2 * level, 1, TOKENS)
        self.accepted = rng.random(TOKENS) < self.q**power

    def rate(self, cost, length):
        """Tokens a draft call."""
        place = tokens = 0
        spent = 0.0
        while place < TOKENS - MOST - 1:
            drafted = length.of(self.q[place : place + MOST])
            right = self.accepted[place : place + drafted]
            kept = drafted if right.all() else int(right.argmin())
            length.learn(drafted, kept)
            tokens, spent, place = tokens + kept + 1, spent + cost + drafted, place + kept + 1
        return tokens / spent


class Length:
    """The confidence product with a threshold."""

    def __init__(self, threshold):
        self.threshold = threshold

    def of(self, q):
        below = np.cumprod(q) < self.threshold
        return int(below.argmax()) + 1 if below.any() else MOST

    def learn(self, drafted, accepted):
        """It does not."""


class BreakEven(Length):
    def __init__(self, cost):
        self.policy = BreakEvenPolicy(BreakEvenSettings(target_cost=cost, max_tokens=MOST))

    def of(self, q):
        for position, probability in enumerate(q, start=1):
            if not self.policy.go_on(one(float(probability), position))[0]:
                return position
        return MOST

    def learn(self, drafted, accepted):
        self.policy.observe(0, PolicyOutcome(drafted, accepted, drafted))


def one(probability, position, free=False):
    signals = Signals([0], [0], [position], torch.zeros(1, 2), None, free=[free])
    signals.__dict__["probability"] = [probability]
    return signals


@pytest.mark.parametrize(
    ("cost", "power", "least"), [(3.0, 0.6, 0.97), (10.0, 1.0, 0.97), (30.0, 2.0, 0.92)]
)
def test_it_is_as_fast_as_the_best_threshold_at_any_cost_and_nearly_with_a_draft_too_sure(
    cost, power, least
):
    text = Text(power, seed=7)
    best = max(text.rate(cost, Length(h)) for h in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8))
    assert text.rate(cost, BreakEven(cost)) > least * best


def test_every_request_begins_anew():
    policy = BreakEvenPolicy(BreakEvenSettings(target_cost=8))
    first = policy.threshold(0)
    assert first == pytest.approx(best_rate(0.7, 8, 20))
    policy.go_on(one(0.9, 1))
    policy.observe(0, PolicyOutcome(1, 0, 1))
    assert policy.threshold(0) != first
    assert policy.threshold(1) == first
    policy.reset(0)
    assert policy.threshold(0) == first


def test_a_candidate_that_takes_no_call_is_always_taken():
    policy = BreakEvenPolicy(BreakEvenSettings(target_cost=8))
    assert policy.go_on(one(1e-3, 1, free=True)) == [True]
    assert policy.go_on(one(1e-3, 2)) == [False]


def test_the_best_rate_is_that_of_the_best_constant_length():
    by_length = [sum(0.7**j for j in range(k + 1)) / (8 + k) for k in range(21)]
    assert best_rate(0.7, 8, 20) == pytest.approx(max(by_length))
    assert best_rate(0.7, 8, 1) == pytest.approx(1.7 / 9)
    assert best_rate(0.01, 8, 20) == pytest.approx(1 / 8)


def test_without_a_profile_the_cost_is_asked_for_in_one_line():
    with pytest.raises(UserError, match="target_cost: profile: there is no profile here"):
        BreakEvenPolicy(BreakEvenSettings()).threshold(0)
