"""Regret is counted against the best arm, and its bounds are the paper's."""

import math

import numpy as np
import pytest

from research.bandits.regret import (
    RoundCosts,
    best_arm,
    best_of_each,
    exp3_bound,
    hardness,
    mean_tokens,
    regret,
    tgd_lower_bound,
    ucb_bound,
)
from specdec_core.tokens.statistics import Round


def course(*tokens, cost=None):
    return RoundCosts(
        np.array(tokens), np.array(cost if cost is not None else np.ones(len(tokens)))
    )


def test_regret_is_the_rounds_beyond_those_of_the_reference():
    slow, fast = [course(2, 2, 2, 2), course(1, 1)], [course(4, 4), course(2)]
    assert best_arm([slow, fast]) == 1
    found = regret(slow, fast)
    # the first 2 tokens are half a round of the reference
    assert found.regret.tolist() == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert found.tokens.tolist() == [2, 4, 6, 8, 9, 10]
    assert found.spent.tolist() == [1, 2, 3, 4, 5, 6]
    assert found.total == 6 - 3
    assert regret(fast, fast).regret.tolist() == [0, 0, 0]


def test_the_best_arm_by_seconds_is_not_that_by_rounds():
    deep = [course(4, 4, cost=[0.4, 0.4])]
    flat = [course(2, 2, 2, 2, cost=[0.1] * 4)]
    assert best_arm([deep, flat]) == 1
    assert regret(deep, flat).regret.tolist() == pytest.approx([0.2, 0.4])


def test_the_best_arm_for_each_prompt_may_be_another_one():
    first, second = [course(4, 4), course(1, 1, 1, 1)], [course(2, 2, 2, 2), course(2, 2)]
    best = best_of_each([first, second])
    assert best == [first[0], second[1]]
    assert regret(first, best).total == 2
    assert regret(second, best).total == 2
    assert regret(best, best).total == 0


def test_outputs_of_other_lengths_are_compared_at_the_mean():
    assert regret([course(3, 3, 3)], [course(3, 3)]).regret.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="2 requests against 1"):
        regret([course(1), course(1)], [course(1)])


def test_a_course_is_read_from_rounds():
    rounds = [Round(0, 3, 2, 3, 3, 0.1, 0.2, 0.3), Round(3, 3, 0, 1, 3, 0.1, 0.2, 0.1)]
    one = RoundCosts.of(rounds)
    assert one.spent.tolist() == [0, 1, 2]
    assert one.reached.tolist() == [0, 3, 4]
    assert mean_tokens([one]) == 2
    assert RoundCosts.of(rounds, timed=True).spent.tolist() == pytest.approx([0, 0.6, 1.0])


def test_requests_of_a_batch_share_their_steps_and_seconds():
    long = [Round(0, 3, 2, 3, 3, 0.1, 0.2, 0.3), Round(3, 3, 0, 1, 3, 0.1, 0.2, 0.1)]
    short = [Round(0, 3, 1, 2, 3, 0.1, 0.2, 0.3)]
    assert RoundCosts.of(long, short).reached.tolist() == [0, 5, 6]
    assert RoundCosts.of(long, short).spent.tolist() == [0, 2, 3]
    assert RoundCosts.of(short, long, timed=True).spent.tolist() == pytest.approx([0, 0.6, 1.0])
    assert mean_tokens([RoundCosts.of(long, short)]) == 2


def test_bounds_are_the_papers():
    means = [2.0, 3.0, 4.0]
    assert hardness(means) == pytest.approx(1 / (4 * 2) + 1 / (4 * 1))
    assert hardness([4.0, 4.0, 2.0]) == pytest.approx(1 / 8)
    lengths = np.array([1, 100])
    p, longest = 0.8, 5
    mean = sum(p**n for n in range(longest + 1))
    factor = p * (1 - p**longest) / (1 - p)
    expected = hardness([mean, 2.0]) * factor * math.log(100)
    assert tgd_lower_bound([mean, 2.0], lengths) == pytest.approx([0, expected])
    assert ucb_bound(means, 5, lengths) == pytest.approx([0, 0.375 * 25 * math.log(100)])
    assert exp3_bound(3, 5, np.array([50])) == pytest.approx([5 * math.sqrt(150 * math.log(3))])
