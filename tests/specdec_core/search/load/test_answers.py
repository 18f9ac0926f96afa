"""Recorded rounds that follow the load equal the live engine's, whenever the load changes."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from specdec_core.cost.forward import ForwardTerms
from specdec_core.cost.steps import StepTimes
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.search.load.answers import drafters_by_load, replayed_answers
from specdec_core.search.load.simulator import shapes_of, simulate_clients
from specdec_core.search.load.step_costs import State, StepCosts
from tests.live_steps import LiveSteps
from tests.specdec_core.kinds import configured
from tests.specdec_core.recordings.recorded import replay_of

TIMES = StepTimes(target=ForwardTerms(fixed=0.01), drafts={"draft": ForwardTerms(fixed=0.001)})
NEW_TOKENS = 24


def chain(k):
    return {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": k}}


PHRASES = {"kind": "token_cache", "learn_from": "output"}
TREE = {"kind": "tree", "branching": [3, 2, 1]}
SCHEDULES: dict[str, dict[int, Any]] = {
    "chains": {1: chain(4), 2: chain(2), 4: None},
    "a rule": {1: {"kind": "svip"}, 2: chain(2), 4: None},
    "lookups": {1: {"kind": "suffix"}, 2: None, 3: {"kind": "prompt_lookup"}},
    "the latest phrases": {1: PHRASES, 2: {"kind": "suffix", "tree": True}},
    "a tree": {1: TREE, 3: chain(3)},
    "a schedule inside": {1: {"kind": "schedule", "ranges": {1: 4, 3: None}}, 2: 2, 5: 3},
}


def schedule(ranges):
    return configured({"kind": "schedule", "ranges": ranges})


@pytest.fixture(scope="module")
def replay(tiny_pair, tmp_path_factory):
    texts = [f"x{n} = {n} + " * (1 + n % 3) for n in range(9)]
    return replay_of(tiny_pair, texts, tmp_path_factory.mktemp("recorded"), NEW_TOKENS)


def requests(replay):
    prompts = replay.recording.prompts.tokens
    return [Request(str(n), tuple(p.tolist()), NEW_TOKENS) for n, p in enumerate(prompts)]


@pytest.mark.parametrize("limits", [Limits(5), Limits(5, step_tokens=24, cache_tokens=512)])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_steps_are_the_live_engines(kind, limits, replay, tiny_pair):
    configuration = schedule(SCHEDULES[kind])
    answers = replayed_answers(replay, configuration)
    shapes = shapes_of(answers, len(answers))
    used: set[int | None] = set()
    for clients in (1, 2, 5):
        engine = Engine(tiny_pair, configuration, limits=limits)
        live = LiveSteps(engine, requests(replay), clients)
        simulated = simulate_clients(StepCosts(answers, TIMES), shapes, clients, limits, log=True)
        assert [step.plan for step in simulated.log] == live.plans
        assert [step.candidates for step in simulated.log] == live.candidates
        used |= {r.arm for g in live.generations.values() for r in g.rounds}
    assert len(used) > 1


def test_a_drafter_with_memory_is_exact_while_it_drafts_alone(replay, tiny_pair):
    configuration = schedule({1: {"kind": "heuristic", "start": 3}, 2: None})
    answers = replayed_answers(replay, configuration)
    shapes = shapes_of(answers, len(answers))
    live = LiveSteps(Engine(tiny_pair, configuration, 2), requests(replay), 1)
    simulated = simulate_clients(StepCosts(answers, TIMES), shapes, 1, Limits(2), log=True)
    assert [step.candidates for step in simulated.log] == live.candidates
    # With changes of the load it still answers everything.
    simulated = simulate_clients(StepCosts(answers, TIMES), shapes, 2, Limits(2))
    assert simulated.records["tokens"].tolist() == list(answers.lengths)


def test_ranges_within_ranges_are_ranges():
    found = drafters_by_load(schedule(SCHEDULES["a schedule inside"]).drafter)
    lengths = {n: each and each.depth for n, each in found.items()}
    assert lengths == {1: 4, 2: 2, 5: 3}


def test_an_engine_that_drafts_whole_chains_drafts_them_in_every_round(replay):
    alone = replayed_answers(replay, configured(chain(4)), whole=True).rounds[1]
    for first, *later in alone:
        assert (first.drafted, first.draft_forwards) == (0, 4)
        assert {(each.drafted, each.draft_forwards) for each in later} <= {(4, 4)}
    changing = schedule(SCHEDULES["chains"])
    by_load = replayed_answers(replay, changing, whole=True)
    for least, most in {1: 4, 2: 2, 4: 0}.items():
        for answer in by_load.rounds[least]:
            assert {each.draft_forwards for each in answer} == {most}


@pytest.mark.parametrize(
    ("drafter", "by_load"),
    [
        (chain(2), {1: {10}}),
        ({"kind": "schedule", "ranges": {1: chain(2), 2: None}}, {1: {10}, 2: {0}}),
        (
            {"kind": "schedule", "ranges": {1: {"kind": "suffix"}, 2: chain(2)}},
            {1: {1000}, 2: {10}},
        ),
        ({"kind": "bandit", "arms": [chain(2), {"kind": "suffix"}]}, {1: {0, 10, 1000}}),
    ],
)
def test_a_step_takes_the_time_of_what_proposes_in_it(drafter, by_load, replay):
    times = TIMES.model_copy(update={"proposals": {"draft draft": 10.0, "suffix": 1000.0}})
    answers = replayed_answers(replay, configured(drafter))
    costs, without = StepCosts(answers, times), StepCosts(answers, TIMES)
    for least, expected in by_load.items():
        shares = {}
        for shape, n in product(shapes_of(answers, len(answers)), range(6)):
            place = shape, least, State(n, n, shape.prompt_tokens + n, costs.unread)
            share, bare = costs.round(*place).share, without.round(*place).share
            shares[round(costs.seconds([share]) - without.seconds([bare]))] = share, bare
        assert shares.keys() == expected
        # Rows of one step pay for it once.
        both, bare = zip(*shares.values(), *shares.values(), strict=True)
        assert round(costs.seconds(both) - without.seconds(bare)) == sum(expected)


def test_everywhere_begins_at_every_position(replay):
    for drafter in (None, chain(4), TREE, {"kind": "suffix"}):
        configuration = configured(drafter)
        everywhere, in_order = replay.everywhere(configuration), replay.run(configuration)
        assert len(everywhere.prompt) == sum(map(len, replay.recording.prompts.outputs))
        starts = zip(everywhere.prompt, everywhere.position, strict=True)
        begins = {p: n for n, p in enumerate(starts)}
        same = [begins[p] for p in zip(in_order.prompt, in_order.position, strict=True)]
        for name in ("drafted", "accepted", "generated", "draft_forwards", "draft_tokens"):
            assert np.array_equal(getattr(everywhere, name)[same], getattr(in_order, name))
