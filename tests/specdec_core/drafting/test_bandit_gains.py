"""Bandits that tell each other what they gained know together what one would have learned."""

from __future__ import annotations

import random

import pytest

from specdec_core.drafting.bandit.rules import SUMS, Bandit, EXP3Spec, Thompson, UCBSpec

ARMS, LONGEST = 3, 4


def pulled(bandit: Bandit, rounds: int, seed: int) -> None:
    """Let it choose, and reward it."""
    random_tokens = random.Random(seed)
    for _ in range(rounds):
        arm = bandit.select()
        tokens = min(random_tokens.randint(1, 2 + arm), LONGEST + 1)
        bandit.update(arm, tokens, 0.01 * (arm + 1))


def exchanged(bandits: list[Bandit]) -> None:
    """What replicas do from time to time."""
    gains = [bandit.gained() for bandit in bandits]
    for place, bandit in enumerate(bandits):
        for other, gain in enumerate(gains):
            if other != place:
                bandit.absorb(gain)


@pytest.mark.parametrize("kind", [UCBSpec, EXP3Spec, Thompson])
@pytest.mark.parametrize("reward", ["tokens", "time"])
def test_after_every_exchange_all_know_the_sums_of_what_each_has_seen(kind, reward):
    before = kind(ARMS, LONGEST, reward=reward)  # what all have read from a file
    pulled(before, 20, seed=9)
    bandits = [kind(ARMS, LONGEST, reward=reward) for _ in range(3)]
    for bandit in bandits:
        bandit.restore(before.state())
    own = [0, 0, 0]
    for turn in range(3):
        for place, bandit in enumerate(bandits):
            pulled(bandit, 5 * place + turn, seed=turn)
            own[place] += 5 * place + turn
        exchanged(bandits)
        assert [sum(bandit.rounds) for bandit in bandits] == [20 + sum(own)] * 3
        for name in SUMS:
            first, *others = (getattr(bandit, name) for bandit in bandits)
            assert all(other == pytest.approx(first) for other in others)
    one = kind(ARMS, LONGEST, reward=reward)
    one.restore(bandits[0].state())
    for other in bandits:
        assert other.preferences() == pytest.approx(one.preferences())
