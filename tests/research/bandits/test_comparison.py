"""Bandits and their arms are compared on the same prompts, decoded as alone or replayed."""

import numpy as np
import pytest

from research.bandits.comparison import ArmsPlan, race, replay_all
from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, parse
from specdec_core.drafting.bandit.drafter import build_bandit
from specdec_core.engine import Engine
from specdec_core.recordings.record import record_requests
from specdec_core.recordings.replay import Replay
from tests.dashboards.conftest import NEW_TOKENS, REQUESTS
from tests.specdec_core.cost.examples import constant_profile

PLAN = parse(
    ArmsPlan,
    {
        "arms": [1, 4, {"kind": "prompt_lookup"}],
        "bandits": [{}, {"rule": "exp3", "seed": 3}, {"reward": "time", "exploration": 0.1}],
    },
    "plan",
)
PROMPTS = [request.tokens for request in REQUESTS]


@pytest.fixture(scope="module")
def raced(tiny_pair):
    return race(tiny_pair, PLAN, PROMPTS, NEW_TOKENS, repeats=2)


def test_everybody_decodes_as_the_engine_does(raced, tiny_pair):
    kinds = [entrant.kind for entrant in raced.entrants]
    assert kinds == ["baseline", *["arm"] * 3, *["bandit"] * 3]
    [baseline] = raced.of("baseline")
    assert baseline.configuration == AUTOREGRESSIVE
    for entrant in raced.of("arm"):
        engine = Engine(tiny_pair, entrant.configuration)
        for request, turn in zip(REQUESTS, entrant.turns, strict=True):
            (expected,) = engine.generate([request])
            assert [r.generated for r in turn[0]] == [r.generated for r in expected.rounds]
    for entrant in raced.entrants:
        assert entrant.outputs == baseline.outputs
        assert np.shape(entrant.seconds) == (2, len(PROMPTS))
        assert entrant.tokens.tolist() == [len(output) for output in entrant.outputs]


def test_a_bandit_goes_on_learning_and_its_state_is_the_first_repeats(raced, tiny_pair):
    for entrant in raced.of("bandit"):
        told = [r for turn in entrant.turns for rounds in turn for r in rounds[1:-1]]
        assert sum(entrant.state["rounds"]) == len(told)
        assert entrant.state["tokens"] == [
            sum(r.generated for r in told if r.arm == arm) for arm in range(3)
        ]
    build_bandit(PLAN.bandits[1].drafter).restore(raced.of("bandit")[1].state)


def test_the_table_is_what_the_rounds_say(raced):
    table = raced.table().set_index("name")
    for entrant in raced.entrants:
        rounds = len(entrant.rounds)
        assert table.loc[entrant.name, "mat"] == pytest.approx(entrant.tokens.sum() / rounds)
        if entrant.kind != "baseline":
            fewest = min(len(arm.rounds) for arm in raced.of("arm"))
            assert table.loc[entrant.name, "regret_rounds"] == pytest.approx(rounds - fewest)
    assert table.loc["autoregressive", "speedup"] == 1
    assert table.loc[raced.fastest.name, "over_best"] == 1
    assert table["differing"].sum() == 0
    arms = table[table["kind"] == "arm"]
    assert (arms["regret_rounds"] >= 0).all()
    assert (arms["regret_seconds"] >= 0).all()
    fewest = sum(
        min(len(arm.turns[turn][0]) for arm in raced.of("arm")) for turn in range(len(PROMPTS))
    )
    for entrant in [*raced.of("arm"), *raced.of("bandit")]:
        assert table.loc[entrant.name, "each_rounds"] == pytest.approx(len(entrant.rounds) - fewest)
    assert (arms["each_rounds"] >= arms["regret_rounds"]).all()
    assert (arms["each_seconds"] >= arms["regret_seconds"] - 1e-9).all()
    shares = raced.shares()
    assert shares.groupby("bandit")["share"].sum().tolist() == pytest.approx([1, 1, 1])


def test_turns_of_several_prompts_are_decoded_together(tiny_pair):
    together = race(tiny_pair, PLAN, PROMPTS[:3], NEW_TOKENS, slots=2)
    alone = race(tiny_pair, PLAN, PROMPTS[:3], NEW_TOKENS)
    for entrant, same in zip(together.of("arm"), alone.of("arm"), strict=True):
        assert [len(turn) for turn in entrant.turns] == [2, 1]
        assert entrant.outputs == same.outputs
        assert len(entrant.rounds) == len(same.rounds)
        assert entrant.mat == same.mat
        # a step of two requests is one step
        steps = [len(course.cost) for course in entrant.courses(timed=True)]
        assert steps == [max(len(rounds) for rounds in turn) for turn in entrant.turns]


def test_replayed_rounds_are_the_decoded_ones(raced, tiny_pair, tmp_path):
    recording = record_requests(tiny_pair, REQUESTS, tmp_path)
    profile = constant_profile(0.1, 0.01)
    replayed = replay_all(Replay(recording, profile=profile), PLAN, profile)
    assert replayed.modelled
    for ours, theirs in zip(replayed.entrants, raced.entrants, strict=True):
        if getattr(ours.configuration.drafter, "reward", "") == "time":
            continue  # live by the clock, here by the profile
        assert [(r.generated, r.drafted, r.arm) for r in ours.rounds] == [
            (r.generated, r.drafted, r.arm) for r in theirs.rounds
        ]
        if ours.kind == "bandit":
            timed = ("seconds", "products", "seconds_squared")
            timeless = [
                {k: v for k, v in e.state.items() if k not in timed} for e in (ours, theirs)
            ]
            assert timeless[0] == timeless[1]
    seconds = sum(0.1 + 0.01 * r.draft_forwards for r in replayed.of("arm")[1].rounds)
    assert np.sum(replayed.of("arm")[1].seconds) == pytest.approx(seconds)
    assert np.isfinite(replayed.table()["tokens_per_second"]).all()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"arms": [4]}, "at least two arms"),
        ({"arms": [1, 2], "bandits": [{"rule": "greedy"}]}, "rule"),
        ({"arms": [1, 2], "bandits": [{}, {"arms": [3, 4]}]}, "have the same arms and sampling"),
        ({"arms": [1, 2], "rules": []}, "rules: unknown key"),
        ({}, "bandits"),
    ],
)
def test_a_plan_that_makes_no_sense_is_one_line(plan, message):
    with pytest.raises(UserError, match=message) as caught:
        parse(ArmsPlan, plan, "plan.yaml")
    assert str(caught.value).startswith("plan.yaml: ")
    assert "\n" not in str(caught.value)
