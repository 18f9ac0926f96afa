"""Regret is counted against the best arm, grows like log for UCBSpec, and shows a broken rule."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

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
    ucb_bound,
)
from specdec_core.drafting.bandit.rules import Bandit, UCBSpec
from specdec_core.tokens.statistics import Round

LONGEST = 4
PARAMETERS = (0.3, 0.5, 0.8)  # of truncated geometric arms


def course(*tokens: int, cost: Sequence[float] | None = None) -> RoundCosts:
    return RoundCosts(
        np.array(tokens), np.array(cost if cost is not None else np.ones(len(tokens)))
    )


def test_regret_is_the_rounds_beyond_those_of_the_reference() -> None:
    slow, fast = [course(2, 2, 2, 2), course(1, 1)], [course(4, 4), course(2)]
    assert best_arm([slow, fast]) == 1
    found = regret(slow, fast)
    # the first 2 tokens are half a round of the reference
    assert found.regret.tolist() == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert found.tokens.tolist() == [2, 4, 6, 8, 9, 10]
    assert found.spent.tolist() == [1, 2, 3, 4, 5, 6]
    assert found.total == 6 - 3
    assert regret(fast, fast).regret.tolist() == [0, 0, 0]


def test_the_best_arm_by_seconds_is_not_that_by_rounds() -> None:
    deep = [course(4, 4, cost=[0.4, 0.4])]
    flat = [course(2, 2, 2, 2, cost=[0.1] * 4)]
    assert best_arm([deep, flat]) == 1
    assert regret(deep, flat).regret.tolist() == pytest.approx([0.2, 0.4])


def test_the_best_arm_for_each_prompt_may_be_another_one() -> None:
    first, second = [course(4, 4), course(1, 1, 1, 1)], [course(2, 2, 2, 2), course(2, 2)]
    best = best_of_each([first, second])
    assert best == [first[0], second[1]]
    assert regret(first, best).total == 2
    assert regret(second, best).total == 2
    assert regret(best, best).total == 0


def test_outputs_of_other_lengths_are_compared_at_the_mean() -> None:
    assert regret([course(3, 3, 3)], [course(3, 3)]).regret.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="2 requests against 1"):
        regret([course(1), course(1)], [course(1)])


def test_a_course_is_read_from_rounds() -> None:
    rounds = [Round(0, 3, 2, 3, 3, 0.1, 0.2, 0.3), Round(3, 3, 0, 1, 3, 0.1, 0.2, 0.1)]
    one = RoundCosts.of(rounds)
    assert one.spent.tolist() == [0, 1, 2]
    assert one.reached.tolist() == [0, 3, 4]
    assert mean_tokens([one]) == 2
    assert RoundCosts.of(rounds, timed=True).spent.tolist() == pytest.approx([0, 0.6, 1.0])


def test_requests_of_a_batch_share_their_steps_and_seconds() -> None:
    long = [Round(0, 3, 2, 3, 3, 0.1, 0.2, 0.3), Round(3, 3, 0, 1, 3, 0.1, 0.2, 0.1)]
    short = [Round(0, 3, 1, 2, 3, 0.1, 0.2, 0.3)]
    assert RoundCosts.of(long, short).reached.tolist() == [0, 5, 6]
    assert RoundCosts.of(long, short).spent.tolist() == [0, 2, 3]
    assert RoundCosts.of(short, long, timed=True).spent.tolist() == pytest.approx([0, 0.6, 1.0])
    assert mean_tokens([RoundCosts.of(long, short)]) == 2


def test_bounds_are_the_papers() -> None:
    means = [2.0, 3.0, 4.0]
    assert hardness(means) == pytest.approx(1 / (4 * 2) + 1 / (4 * 1))
    assert hardness([4.0, 4.0, 2.0]) == pytest.approx(1 / 8)
    lengths = np.array([1, 100])
    assert ucb_bound(means, 5, lengths) == pytest.approx([0, 0.375 * 25 * math.log(100)])
    assert exp3_bound(3, 5, np.array([50])) == pytest.approx([5 * math.sqrt(150 * math.log(3))])


# Simulated: truncated geometric arms (the slides' Eq. 1), one long text.


def mean_of(p: float) -> float:
    return sum(p**i for i in range(LONGEST + 1))


def simulate(
    bandit: Bandit,
    rounds: int,
    seed: int,
    broken: bool = False,
    parameters: tuple[float, ...] = PARAMETERS,
) -> np.ndarray:
    """Expected stopping-time regret after each round: Σ Δ of the pulled arms, in rounds of the
    best."""
    uniform = random.Random(seed)
    best = max(map(mean_of, parameters))
    lost = []
    for _ in range(rounds):
        arm = uniform.randrange(len(parameters)) if broken else bandit.select()
        tokens = 1
        while tokens <= LONGEST and uniform.random() < parameters[arm]:
            tokens += 1
        bandit.update(arm, tokens, 1.0) if not broken else None
        lost.append((best - mean_of(parameters[arm])) / best)
    return np.cumsum(lost)


def growth(curves: list[np.ndarray]) -> float:
    """Regret gained from a tenth of the rounds on, over that gained in the first tenth."""
    mean = np.mean(curves, axis=0)
    first = mean[len(mean) // 10]
    return float((mean[-1] - first) / first)


def test_regret_of_ucbspec_grows_like_a_logarithm_and_stays_below_its_order() -> None:
    rounds = 20_000
    curves = [simulate(UCBSpec(3, LONGEST), rounds, seed) for seed in range(3)]
    # linear would be 9, a logarithm log(20000)/log(2000) − 1 = 0.3
    assert growth(curves) < 1
    means = [mean_of(p) for p in PARAMETERS]
    # Σ Δ_i n_i / μ* with the n_i at which 2 cr_i = Δ_i
    inside = 1 + 2 * math.log(3 * rounds**2.5 / 0.05)
    most = hardness(means) * LONGEST**2 * inside + 2 * len(means)
    assert max(curve[-1] for curve in curves) < most


def test_a_rule_that_learns_nothing_has_linear_regret() -> None:
    curve = simulate(UCBSpec(3, LONGEST), 20_000, seed=0, broken=True)
    assert growth([curve]) == pytest.approx(9, abs=0.5)
    means = [mean_of(p) for p in PARAMETERS]
    assert curve[-1] > 10 * ucb_bound(means, LONGEST, np.array([50_000]))[0]
