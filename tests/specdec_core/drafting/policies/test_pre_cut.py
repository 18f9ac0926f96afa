"""Pre-cut learns when to stop, keeps what it learned, and can be read."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.policy import PolicyOutcome
from specdec_core.drafting.policies.pre_cut import PreCutPolicy, PreCutSettings, QTable
from specdec_core.engine import Engine
from specdec_core.models.eagle.runner import EagleRunner
from tests.specdec_core.models.eagle.pair_heads import head_of

NEVER = 1e-9
# A policy that does as its table says.
SURE = {"exploration": 0.0}


def goes_on(policy, probability, position, calls, free=False, slot=0):
    """The policy's answer to one candidate."""
    asked = {"slots": slot, "positions": position, "probability": probability}
    asked |= {"calls": calls, "free": free}
    [go] = policy.go_on(SimpleNamespace(**{name: [value] for name, value in asked.items()}))
    return go


def draft_round(policy, probabilities, accepted, slot=0):
    """Draft along `probabilities` as long as the policy likes, and tell it how many of the
    candidates the target would accept. Returns the candidates drafted."""
    for position, probability in enumerate(probabilities, start=1):
        if not goes_on(policy, probability, position, position, slot=slot):
            break
    policy.observe(slot, PolicyOutcome(position, min(position, accepted), position))
    return position


def test_q_init_goes_on_in_every_state_until_the_last():
    settings = PreCutSettings(max_tokens=5, bins=4, optimism=0.02, target_cost=5)
    table = PreCutPolicy(settings).table
    assert len(table.go) == 20
    assert np.subtract(table.go, table.stop) == pytest.approx(0.02)
    policy = PreCutPolicy(PreCutSettings(max_tokens=5, **SURE, target_cost=5))
    assert draft_round(policy, [0.5] * 5, accepted=0) == 5


INFORMED = PreCutSettings(max_tokens=8, target_cost=5, q_init="confidence", updates=False, **SURE)


def test_q_init_by_confidence_stops_where_confidences_promise_no_more():
    table = PreCutPolicy(INFORMED).table
    sure, unsure = 0, INFORMED.bins - 1  # after one call
    assert table.go[sure] > table.stop[sure]
    assert table.go[unsure] < table.stop[unsure]
    # All of one confidence q: 1 + q + … + q^k tokens for k calls and a target worth 5.
    q = 2 ** (-0.25)
    assert table.stop[sure] == pytest.approx((1 + q) / 6 - 1)


def test_a_table_that_is_not_updated_stays_q_init():
    policy = PreCutPolicy(INFORMED)
    before = policy.table.go.copy(), policy.table.stop.copy()
    lengths = [draft_round(policy, [q] * 8, accepted=0) for q in (0.99, 0.5, 0.05)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1] == 1
    assert (policy.table.go, policy.table.stop) == before


def test_a_cost_from_the_profile_is_filled_in_and_must_be():
    """Wherever policies are: in a bandit's arm, in a part of a drafter."""

    class Costs:
        def target_cost(self, draft=None):
            return {None: 14.0, "b": 3.5}[draft]

        def target_in_candidates(self, draft=None):
            return self.target_cost(draft) / 2

    even = {"kind": "draft_model", "policy": {"kind": "break_even"}}
    arms = [
        {"kind": "pre_cut"},
        even,
        {"kind": "post_use", "draft": "b", "policy": {"kind": "pre_cut"}},
    ]
    asked = Configuration.model_validate({"drafter": {"kind": "bandit", "arms": arms}})
    assert asked.unpriced == (None, "b")
    priced = asked.priced(Costs())
    assert [policy.target_cost for _, policy in priced.policies] == [14.0, 7.0, 3.5]
    assert priced.unpriced == ()
    assert Configuration.model_validate(asked.model_dump(mode="json")) == asked
    assert "q_init" not in asked.to_yaml()
    with pytest.raises(UserError, match="give a number"):
        PreCutPolicy(PreCutSettings())


def test_a_head_is_timed_when_it_reads(tiny_pair, monkeypatch):
    pair, read = replace(tiny_pair, drafts={"head": head_of(tiny_pair)}), []
    forward = EagleRunner._read
    monkeypatch.setattr(
        EagleRunner, "_read", lambda *given: (read.append(given), forward(*given))[1]
    )
    Engine(pair, Configuration(drafter=DraftModelSettings(policy=PreCutSettings())))
    assert len(read) >= 7


def test_a_round_updates_every_position_by_the_bellman_equation():
    settings = PreCutSettings(max_tokens=3, bins=4, target_cost=2, learning_rate=0.25, **SURE)
    policy = PreCutPolicy(settings)
    table, initial = policy.table, QTable.initial(settings)
    # After 1, 2, 3 candidates: Π = 0.9, 0.45, 0.405, in bins 0, 2, 2 of four a row.
    first, second, third = 0, 4 + 2, 8 + 2
    rewards = {first: 2 / 3 - 1, second: 2 / 4 - 1, third: 2 / 5 - 1}

    # The first trial replaces what the table began with …
    assert draft_round(policy, [0.9, 0.5, 0.9], accepted=1) == 3
    assert {state: table.stop[state] for state in rewards} == pytest.approx(rewards)
    untouched = set(range(12)) - set(rewards)
    assert all(table.stop[state] == initial.stop[state] for state in untouched)
    # … and CONTINUE is worth what can be had from the next state on; nothing follows the third.
    assert table.go[second] == pytest.approx(0.99 * 2 / 5 - 1)
    assert table.go[first] == pytest.approx(0.99 * 2 / 4 - 1)
    assert table.go[third] == initial.go[third]
    assert np.flatnonzero(table.stopped).tolist() == [first, second, third]
    assert np.flatnonzero(table.gone).tolist() == [first, second]

    # Later trials count less, never less than the learning rate.
    for trial, rate in enumerate((1 / 2, 1 / 3, 1 / 4, 1 / 4), start=2):
        before = table.stop[first]
        draft_round(policy, [0.9, 0.5, 0.9], accepted=trial % 2)
        earned = (1 + trial % 2) / 3 - 1
        assert table.stop[first] == pytest.approx((1 - rate) * before + rate * earned)


def test_it_learns_from_accepted_counts_how_far_drafting_pays():
    # The draft is equally sure of itself throughout; only verification tells.
    for accepted, expected in ((0, 1), (3, 3), (10, 10)):
        policy = PreCutPolicy(PreCutSettings(max_tokens=10, target_cost=5))
        drafted = [draft_round(policy, [0.95] * 10, accepted) for _ in range(600)]
        assert drafted[0] != 1
        assert set(drafted[-50:]) == {expected}


def test_it_tells_sure_drafts_from_unsure_ones():
    policy = PreCutPolicy(PreCutSettings(max_tokens=8, target_cost=5))
    for _ in range(400):
        draft_round(policy, [0.99] * 8, accepted=8)
        draft_round(policy, [0.3] * 8, accepted=0)
    assert draft_round(policy, [0.99] * 8, accepted=8) == 8
    assert draft_round(policy, [0.3] * 8, accepted=0) == 1


def test_exploration_is_the_same_every_time_and_dies_out():
    def run(seed):
        settings = PreCutSettings(max_tokens=10, seed=seed, learning_rate=NEVER, target_cost=5)
        policy = PreCutPolicy(settings)
        return [draft_round(policy, [0.9] * 10, accepted=10) for _ in range(400)]

    first, again, other = run(0), run(0), run(1)
    assert first == again
    assert first != other
    assert len(set(first[:40])) > 4  # random stops
    assert set(first[-40:]) == {10}


def test_a_saved_table_goes_on_as_the_one_that_was_saved(tmp_path):
    settings = PreCutSettings(max_tokens=6, target_cost=5)
    policy = PreCutPolicy(settings)
    rounds = [([0.3 + 0.1 * (i % 7)] * 6, i % 5) for i in range(160)]
    for probabilities, accepted in rounds[:80]:
        draft_round(policy, probabilities, accepted)
    path = policy.table.save(tmp_path / "new" / "table.json")
    restored = PreCutPolicy(settings.model_copy(update={"table": str(path)}))
    assert restored.table == policy.table
    following = [
        [draft_round(p, probabilities, accepted) for probabilities, accepted in rounds[80:]]
        for p in (policy, restored)
    ]
    assert following[0] == following[1]
    assert len(set(following[0])) > 1
    assert restored.table == policy.table != QTable.load(path)


def test_one_table_serves_all_slots_and_outlives_requests():
    policy = PreCutPolicy(PreCutSettings(max_tokens=4, **SURE, target_cost=5))
    draft_round(policy, [0.9] * 4, accepted=0, slot=0)
    learned = policy.table.model_copy(deep=True)
    policy.reset(0)
    assert policy.table == learned
    draft_round(policy, [0.9] * 4, accepted=0, slot=3)
    assert sum(policy.table.stopped) == sum(learned.stopped) + 1  # stops at once


def test_a_round_that_was_never_verified_teaches_nothing():
    policy = PreCutPolicy(PreCutSettings(max_tokens=4, **SURE, target_cost=5))
    goes_on(policy, 0.9, 1, 1)
    policy.reset(0)
    policy.observe(0, PolicyOutcome(1, 1, 1))
    assert not any(policy.table.stopped)


def test_candidates_that_a_guess_brought_are_free_and_cached_phrases_are_earned():
    policy = PreCutPolicy(PreCutSettings(max_tokens=6, bins=4, target_cost=3, **SURE))
    # Two calls: the first yields three candidates, the second two.
    for position, (calls, free) in enumerate(
        [(1, True), (1, True), (1, False), (2, True), (2, False)], start=1
    ):
        goes_on(policy, 1.0, position, calls, free)
    policy.observe(0, PolicyOutcome(5, 5, 2, reused=2))
    table = policy.table
    assert [state for state, trials in enumerate(table.stopped) if trials] == [0, 4]
    assert table.stop[0] == pytest.approx(4 / 4 - 1)  # three candidates for one call
    assert table.stop[4] == pytest.approx(8 / 5 - 1)  # and the phrases, for what came of it all
    assert table.go[0] == pytest.approx(0.99 * 8 / 5 - 1)


GOOD = QTable.initial(PreCutSettings(max_tokens=3, bins=4, target_cost=5)).model_dump()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("{", "not a Q-table"),
        ('{"max_tokens": 2}', "bins: Field required"),
        (json.dumps({**GOOD, "go": [0.0]}), "go must be 12 finite numbers"),
        (json.dumps({**GOOD, "stop": [float("nan")] * 12}), "stop must be 12 finite numbers"),
        (json.dumps(GOOD), "max_tokens 3 and bins 4, but the policy has max_tokens 20 and bins 8"),
    ],
)
def test_a_broken_or_foreign_table_is_refused_with_one_line(tmp_path, text, message):
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        PreCutPolicy(PreCutSettings(table=str(path), target_cost=5))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
