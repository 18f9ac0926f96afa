"""The rules of bandits follow their formulas, learn, and continue from a saved state."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.base.errors import UserError
from specdec_core.drafting.bandit.drafter import build_bandit
from specdec_core.drafting.bandit.rules import SUMS, EXP3Spec, Thompson, UCBSpec
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.drafting.states import load_state, save_state

RULES = [
    lambda: UCBSpec(3, 4),
    lambda: UCBSpec(3, 4, reward="time"),
    lambda: EXP3Spec(3, 4, seed=5),
    lambda: EXP3Spec(3, 4, reward="time"),
    lambda: Thompson(3, 4, seed=5),
    lambda: Thompson(3, 4, reward="time"),
]
plays = st.lists(
    st.tuples(st.integers(1, 5), st.floats(1e-4, 1e3, allow_nan=False)), min_size=1, max_size=60
)


def play(bandit, rewards):
    chosen = []
    for tokens, seconds in rewards:
        chosen.append(bandit.select())
        bandit.update(chosen[-1], tokens, seconds)
    return chosen


def test_ucb_takes_each_arm_once_and_then_the_highest_bound():
    bandit = UCBSpec(3, 4, confidence=0.05)
    assert play(bandit, [(1, 1.0), (5, 1.0), (2, 1.0)]) == [0, 1, 2]
    # t = 3, n = 1: 4/2 · √(2/1 · (1 + 2 log(3 · 9 · √2 / 0.05)))
    radius = 2 * math.sqrt(2 * (1 + 2 * math.log(3 * 9 * math.sqrt(2) / 0.05)))
    assert radius == pytest.approx(10.6869, abs=1e-4)
    assert bandit.preferences() == pytest.approx([1 + radius, 5 + radius, 2 + radius])
    assert bandit.select() == 1
    bandit.update(1, 1, 1.0)
    # t = 4; arm 1 has n = 2 and mean 3
    twice = 2 * math.sqrt(3 / 4 * (1 + 2 * math.log(3 * 16 * math.sqrt(3) / 0.05)))
    once = 2 * math.sqrt(2 * (1 + 2 * math.log(3 * 16 * math.sqrt(2) / 0.05)))
    assert bandit.preferences() == pytest.approx([1 + once, 3 + twice, 2 + once])
    assert bandit.select() == 2


def test_thompson_draws_from_what_an_arms_rounds_leave_open():
    bandit = Thompson(2, 4, seed=3)
    play(bandit, [(1, 1.0), (5, 1.0)])
    bandit.update(0, 3)
    # Arm 0: 1 and 3 tokens, V = 2; arm 1: 5 tokens, V = 0; L²/4 = 4.
    draws = random.Random(3 << 32 | 2)
    drawn = [draws.gauss(2, math.sqrt(4 + 2) / 2), draws.gauss(5, math.sqrt(4))]
    assert bandit.select() == drawn.index(max(drawn))
    assert bandit.worths() == [2, 5]
    timed = Thompson(2, 4, reward="time")
    for tokens, seconds in ((2, 1.0), (4, 2.0)):
        timed.update(0, tokens, seconds)  # a longer round adds as many more tokens: V = 0
    timed.update(1, 3, 3.0)
    assert timed.uncertainty(0) == pytest.approx(1)
    assert timed.worths() == pytest.approx([3, 1.5])


def test_exp3_weighs_losses_by_their_probabilities():
    bandit = EXP3Spec(2, 4)
    assert bandit.preferences() == [0.5, 0.5]
    first = bandit.select()
    bandit.update(first, 2)
    # Ẑ = (4 + 1 − 2) / (4 · 0.5) = 1.5; at the second pull η = √(log 2 / (2 · 2))
    assert bandit.losses[first] == 1.5
    rate = math.sqrt(math.log(2) / 4)
    other = 1 / (1 + math.exp(-rate * 1.5))
    assert bandit.preferences()[1 - first] == pytest.approx(other)
    second = bandit.select()
    p = bandit.preferences()[second]
    before = bandit.losses[second]
    bandit.update(second, 5)  # everything accepted: no loss
    assert bandit.losses[second] == before
    bandit.select()
    assert p > 0


def test_slots_of_a_batch_are_weighed_by_what_they_were_drawn_with():
    bandit = EXP3Spec(2, 4, seed=1)
    arms = [bandit.select(slot) for slot in range(6)]
    assert set(arms) == {0, 1}
    for slot, arm in reversed(list(enumerate(arms))):
        bandit.update(arm, 3, slot=slot)
    # all were drawn at p = ½, however the probabilities have moved since
    assert bandit.losses == [1.0 * arms.count(0), 1.0 * arms.count(1)]


def test_a_round_without_an_update_is_no_pull():
    bandit = EXP3Spec(2, 4)
    bandit.select(0)
    arm = bandit.select(0)
    bandit.update(arm, 1)
    assert sum(bandit.rounds) == 1
    assert bandit.selections == 2


def test_reward_in_time_is_the_ratio_of_sums():
    """Arm 1 adds fewer tokens a round and more a millisecond."""
    bandits = {reward: UCBSpec(2, 4, reward=reward, exploration=0) for reward in ("tokens", "time")}
    for bandit in bandits.values():
        for tokens, seconds in ((5, 0.030), (3, 0.010)):
            bandit.update(0, tokens, seconds)
        for tokens, seconds in ((3, 0.010), (1, 0.002)):
            bandit.update(1, tokens, seconds)
    assert bandits["tokens"].preferences() == [4, 2]
    # in rounds of the faster arm, 6 ms: 8 tokens in 40 ms, 4 tokens in 12 ms
    assert bandits["time"].preferences() == pytest.approx([6 * 8 / 40, 6 * 4 / 12])
    rates = [row["per_millisecond"] for row in bandits["time"].rows()]
    assert rates == pytest.approx([8 / 40, 4 / 12])
    assert bandits["time"].select() == 1


def test_a_slow_first_round_does_not_write_an_arm_off():
    bandit = UCBSpec(2, 4, reward="time")
    bandit.update(0, 5, 1.0)  # a hundred times slower than it will be
    bandit.update(1, 2, 0.01)
    chosen = 0
    for _ in range(300):
        arm = bandit.select()
        chosen += arm == 0
        bandit.update(arm, 5 if arm == 0 else 2, 0.01)
    assert chosen > 100


def test_by_time_the_radius_follows_how_far_tokens_deviate_from_what_time_foretells():
    bandit = UCBSpec(2, 4, reward="time")
    rounds = [(5, 0.030), (3, 0.010), (1, 0.008)]
    for tokens, seconds in rounds:
        bandit.update(0, tokens, seconds)
    bandit.update(1, 2, 0.01)
    rate = 9 / 0.048
    deviations = sum((tokens - rate * seconds) ** 2 for tokens, seconds in rounds)
    assert bandit.deviations(0) == pytest.approx(deviations)
    assert bandit.radius(0) == pytest.approx(math.sqrt((4 + deviations) * 2 * math.log(4)) / 3)
    assert bandit.deviations(1) == 0
    assert bandit.radius(1) == pytest.approx(math.sqrt(4 * 2 * math.log(4)))


@pytest.mark.parametrize("make", RULES)
@settings(max_examples=40)
@given(before=plays, after=plays)
def test_a_restored_bandit_goes_on_identically(make, before, after):
    bandit, other = make(), make()
    play(bandit, before)
    other.restore(json.loads(json.dumps(bandit.state())))
    assert play(other, after) == play(bandit, after)
    assert other.state() == bandit.state()


def test_a_saved_state_is_read_whole_or_refused(tmp_path):
    bandit = UCBSpec(2, 4, names=["one", "two"])
    play(bandit, [(3, 1.0), (4, 1.0), (5, 1.0)])
    path = save_state(bandit.state(), tmp_path / "state.json")
    again = UCBSpec(2, 4, names=["one", "two"])
    again.restore(load_state(path), str(path))
    assert again.state() == bandit.state()
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
    for other, message in (
        (UCBSpec(2, 4, names=["one", "three"]), "of other arms: one, two"),
        (UCBSpec(3, 4), "of other arms"),
        (UCBSpec(2, 5, names=["one", "two"]), "of other arms"),
        (EXP3Spec(2, 4, names=["one", "two"]), "learned by ucb by tokens"),
        (UCBSpec(2, 4, names=["one", "two"], reward="time"), "the bandit is ucb by time"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            other.restore(load_state(path), str(path))
        assert "\n" not in str(caught.value)
        assert sum(other.rounds) == 0
    for text, message in (
        ("{", "not a saved state"),
        ("[]", "not a saved state"),
        ("{}", "not a bandit's state"),
        (json.dumps(bandit.state() | {"rounds": [1, 2, 3]}), "rounds must be 2 finite numbers"),
        (json.dumps(bandit.state() | {"tokens": [-1, 2]}), "tokens must be 2 finite numbers"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message) as caught:
            again.restore(load_state(path), str(path))
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
    with pytest.raises(UserError, match="no saved state can be read"):
        load_state(tmp_path / "none.json")


def test_a_state_follows_its_arms(tmp_path):
    """Arms are known by their ids: in another order they are the same arms."""
    arms = [{"kind": "prompt_lookup"}, 2, 5]
    bandit = build_bandit(BanditSettings(arms=arms))
    play(bandit, [(3, 1.0)] * 7 + [(2, 1.0)] * 5)
    state = bandit.state()
    other = build_bandit(BanditSettings(arms=arms[::-1]))
    other.restore(state)
    assert other.rounds == bandit.rounds[::-1]
    assert other.tokens == bandit.tokens[::-1]
    with pytest.raises(UserError, match="of other arms: prompt lookup"):
        build_bandit(BanditSettings(arms=[*arms[:2], 6])).restore(state)


def test_settings_build_the_bandit_that_they_describe(bare_home):
    ucb = BanditSettings(arms=[1, 2, {"kind": "prompt_lookup"}], confidence=0.1, exploration=0.3)
    bandit = build_bandit(ucb)
    assert (bandit.confidence, bandit.exploration, bandit.longest) == (0.1, 0.3, 10)
    assert bandit.names[:2] == ["draft, K=1", "draft, K=2"]
    exp3 = BanditSettings(arms=[1, 4], rule="exp3", reward="time", seed=3)
    bandit = build_bandit(exp3)
    assert (bandit.seed, bandit.reward, bandit.longest) == (3, "time", 4)

    play(bandit, [(3, 1.0)] * 9)
    save_state(bandit.state(), bare_home / "bandits" / "known.json")
    for name in ("known", str(bare_home / "bandits" / "known.json")):
        named = exp3.model_copy(update={"state": name})
        assert build_bandit(named).state() == bandit.state()


def pulled(bandit, rounds, seed):
    """Let it choose, and reward it."""
    random_tokens = random.Random(seed)
    for _ in range(rounds):
        arm = bandit.select()
        tokens = min(random_tokens.randint(1, 2 + arm), 5)
        bandit.update(arm, tokens, 0.01 * (arm + 1))


def exchanged(bandits):
    """What replicas do from time to time."""
    gains = [bandit.gained() for bandit in bandits]
    for place, bandit in enumerate(bandits):
        for other, gain in enumerate(gains):
            if other != place:
                bandit.absorb(gain)


@pytest.mark.parametrize("kind", [UCBSpec, EXP3Spec, Thompson])
@pytest.mark.parametrize("reward", ["tokens", "time"])
def test_after_every_exchange_all_know_the_sums_of_what_each_has_seen(kind, reward):
    before = kind(3, 4, reward=reward)  # what all have read from a file
    pulled(before, 20, seed=9)
    bandits = [kind(3, 4, reward=reward) for _ in range(3)]
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
    one = kind(3, 4, reward=reward)
    one.restore(bandits[0].state())
    assert all(other.worths() == pytest.approx(one.worths()) for other in bandits)
