"""The simulation takes the steps, candidates and answers of the live engine."""

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest

from dashboards.reports.load_choice import loads
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.cost.forward import ForwardTerms
from specdec_core.cost.steps import StepTimes
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.recordings.rounds import ReplayedRounds
from specdec_core.search.load import decoded
from specdec_core.search.load.answers import (
    Answers,
    SimulatedRound,
    drafters_by_load,
    replayed_answers,
)
from specdec_core.search.load.choice import choose_for_load
from specdec_core.search.load.decoded import (
    can_simulate,
    kept_rounds,
    recorded_requests,
    with_decoded,
)
from specdec_core.search.load.live import run_arrivals
from specdec_core.search.load.records import records_frame
from specdec_core.search.load.replica import Replica
from specdec_core.search.load.schedule import drafter_at
from specdec_core.search.load.simulator import shapes_of, simulate_clients
from specdec_core.search.load.step_costs import State, StepCosts
from specdec_core.search.load.workload import Workload
from specdec_core.tokens.statistics import rounds_frame
from tests.live_steps import LiveSteps
from tests.load_timer import ALWAYS_FREE
from tests.specdec_core.kinds import chain, configured
from tests.specdec_core.recordings.recorded import replay_of

CONFIGURATIONS = {
    "autoregressive": Configuration(),
    "draft": configured(chain(max_tokens=4)),
    "lookup": configured({"kind": "prompt_lookup"}),
}
LIMITS = {
    "four": Limits(4),
    "roomy": Limits(3),
    "small steps": Limits(3, step_tokens=24),
    "full cache": Limits(3, step_tokens=24, cache_tokens=320),
}


def some_requests(count):
    rng = random.Random(0)
    common = tuple(rng.randrange(1, 200) for _ in range(30))

    def tokens():
        begin = common[: rng.choice((0, 30))]
        return *begin, *(rng.randrange(1, 200) for _ in range(rng.choice((3, 20, 70))))

    return [Request(str(n), tokens(), rng.choice((5, 40, 90))) for n in range(count)]


def answers_of(generations, draft):
    names = "drafted", "generated", "draft_forwards", "draft_tokens", "depth"
    rounds = [
        [SimulatedRound(*(getattr(r, n) for n in names)) for r in g.rounds] for g in generations
    ]
    return Answers([g.prompt_tokens for g in generations], {1: rounds}, draft)


@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        *(("autoregressive", "roomy"), ("draft", "small steps"), ("lookup", "small steps")),
        *(("draft", "full cache"), ("lookup", "full cache")),
    ],
)
def test_the_steps_are_the_live_engines(kind, limits, tiny_pair):
    configuration, requests = CONFIGURATIONS[kind], some_requests(9)
    alone = Engine(tiny_pair, configuration).generate(requests)
    answers = answers_of(alone, "draft" if kind == "draft" else None)
    for clients in (1, 4):
        engine = Engine(tiny_pair, configuration, limits=LIMITS[limits])
        live = LiveSteps(engine, requests, clients)
        steps, records = simulated(answers, clients, LIMITS[limits])
        assert steps == live.steps
        assert records["tokens"].tolist() == live.records["tokens"].tolist()
        if clients == 4 and LIMITS[limits].cache_tokens:
            assert engine.scheduler.preemptions > 0


def simulated(answers, clients, limits=LIMITS["four"]):
    """The plan of each step with its candidates, and records. Every prompt is asked once."""
    shapes, steps, end = shapes_of(answers, len(answers)), [], Replica.end

    def noted(replica, now):
        steps.append((replica._plan, [cost.drafted for _, cost in replica._rounds]))
        return end(replica, now)

    with patch.object(Replica, "end", noted):
        found = simulate_clients(StepCosts(answers, ALWAYS_FREE), shapes, clients, limits)
    return steps, found.records


def test_texts_of_free_slots_leave_the_cache_to_those_that_run(tiny_pair):
    limits = Limits(5, cache_tokens=640, share_prefixes=True)
    engine = Engine(tiny_pair, CONFIGURATIONS["lookup"], limits=limits)
    short = [Request(str(n), tuple(range(n, n + 50)), 12, ignore_eos=True) for n in range(1, 6)]
    engine.generate(short)
    assert sum(engine.target.lengths) > 250
    for first in (20, 60):
        engine.add(Request(f"long {first}", tuple(range(first, first + 230)), 20, ignore_eos=True))
    while not engine.idle:
        engine.step()
        assert sum(engine.target.lengths) <= 640


def test_a_client_sends_its_next_request_before_the_step_after_its_answer(tiny_pair):
    run = LiveSteps(Engine(tiny_pair, slots=4), some_requests(9), 3)
    steps = [(n, name) for n, plan in enumerate(run.plans) for name in plan.entering.values()]
    entered = {name: step for step, name in steps}
    ended = {name: step for step, names in enumerate(run.decoded) for name in names}
    # Request n is sent after the (n - 3)rd answer.
    asked = enumerate(sorted(ended.values())[:6], start=3)
    assert {entered[str(number)] - step for number, step in asked} == {1}
    assert (run.records["first"] > run.records["sent"]).all()


def test_live_requests_of_an_open_loop_come_when_they_should(tiny_pair):
    requests = some_requests(6)
    arrivals = [0.0, 0.0, 0.01, 0.02, 0.3, 0.3]
    records = records_frame(run_arrivals(Engine(tiny_pair, slots=2), requests, arrivals))
    assert records["sent"].tolist() == arrivals
    assert (records["first"] > records["sent"]).all()
    assert (records["last"] >= records["first"]).all()
    assert records["error"].isna().all()


TREE = {"kind": "dynamic_tree", "policy": {"kind": "fixed", "max_tokens": 6}}
CHAIN = chain(max_tokens=1)
REPLAYABLE: Mapping[str, dict[str, Any]] = {
    "chain": CHAIN,
    "heuristic": chain("heuristic", start=3),
    "bandit": {"kind": "bandit", "arms": [CHAIN, {"kind": "suffix"}]},
    "hybrid": {"kind": "hybrid", "lookup": {"kind": "suffix"}, "otherwise": CHAIN},
}
SLOW_BEYOND_A_FEW = StepTimes(
    target=ForwardTerms(fixed=0.01, per_token_beyond=0.01, knee=26),
    drafts={"draft": ForwardTerms(fixed=0.0001)},
)


@pytest.fixture(scope="module")
def decode(replay, tiny_pair):
    engine = Engine(tiny_pair)

    def rounds(configuration):
        engine.configure(configuration)
        return rounds_frame(engine.generate(recorded_requests(replay.recording)))

    return rounds


@pytest.mark.parametrize("name", REPLAYABLE)
def test_live_rounds_simulate_as_replayed_ones(name, replay, decode):
    configuration = configured(REPLAYABLE[name])
    assert replay.can(configuration)
    rounds = ReplayedRounds.of_frame(decode(configuration), replay.recording.prompts.ids)
    live = replay.knowing({configuration.id: rounds})
    for clients in (1, 4):
        told = (replayed_answers(known, configuration) for known in (replay, live))
        runs = [simulated(answers, clients) for answers in told]
        assert runs[0][0] == runs[1][0]
        pd.testing.assert_frame_equal(runs[0][1], runs[1][1])


def test_a_tree_is_simulated_as_the_engine_decodes_it(replay, decode, tiny_pair):
    tree = configured(TREE)
    known = with_decoded(replay, [tree], decode)
    prompts = enumerate(recorded_requests(replay.recording))
    requests = [replace(request, id=str(n)) for n, request in prompts]
    for clients in (1, 4):
        live = LiveSteps(Engine(tiny_pair, tree, 4), requests, clients)
        assert simulated(replayed_answers(known, tree), clients)[0] == live.steps


def test_what_cannot_be_replayed_competes_and_is_marked(replay, decode):
    tree, chain = configured(TREE), configured(CHAIN)
    known = with_decoded(replay, [tree, chain], decode)
    assert can_simulate(known, tree)
    assert not can_simulate(replay, tree)  # it is unchanged
    workload = Workload(clients=(1, 4), requests=8)
    choice, table = choose_for_load([tree, chain], known, SLOW_BEYOND_A_FEW, workload)
    assert drafter_at(choice.chosen, 1) == tree.drafter
    assert drafter_at(choice.chosen, 4) == chain.drafter
    assert set(choice.decoded) == {tree.id, choice.chosen.id}  # the schedule has the tree
    marked = table.set_index("config_id")["decoded_live"]
    assert set(marked.index[marked]) == set(choice.decoded)
    section = loads(choice)
    assert "† decoded live" in (section.legend or "")
    assert section.shown["configuration"].str.contains("† ★").any()


def test_rounds_are_decoded_once_and_kept_whole(replay, decode, monkeypatch):
    tree = configured(TREE)
    folder = replay.recording.folder / "decoded"
    asked: list[str] = []

    def stopped(configuration):
        raise KeyboardInterrupt

    def noted(configuration):
        asked.append(configuration.id)
        return decode(configuration)

    with pytest.raises(KeyboardInterrupt):
        with_decoded(replay, [tree], kept_rounds(replay.recording, stopped))
    assert not list(folder.glob("*"))
    first = with_decoded(replay, [tree], kept_rounds(replay.recording, noted))
    again = with_decoded(replay, [tree], kept_rounds(replay.recording, stopped))
    assert asked == [tree.id]
    assert first.run(tree).counts == again.run(tree).counts
    assert len(list(folder.iterdir())) == 1
    # So does changed code, of the settings or of the run time.
    code = "".join(decoded._code(configured({"kind": "dynamic_tree"})))
    assert "class DynamicTreeSettings(" in code
    assert "class DynamicTreeDrafter(" in code
    # A head or state that is trained anew drafts otherwise.
    monkeypatch.setattr(decoded, "trained_digests", lambda _: {"state some": "new"})
    with_decoded(replay, [tree], kept_rounds(replay.recording, noted))
    assert asked == [tree.id] * 2


def test_what_no_rounds_tell_is_refused_as_before(replay, decode):
    pearl = configured({"kind": "pearl"})
    with pytest.raises(UserError, match="depends on time"):
        replayed_answers(with_decoded(replay, [pearl], decode), pearl)


NEW_TOKENS = 24
SUFFIX, TWO = {"kind": "suffix"}, chain(max_tokens=2)
PHRASES = {"kind": "token_cache", "learn_from": "output"}
ANSWER_TREE = {"kind": "tree", "branching": [3, 2, 1]}
SCHEDULES: dict[str, dict[int, Any]] = {
    "chains": {1: chain(max_tokens=4), 2: TWO, 4: None},
    "a rule": {1: {"kind": "svip"}, 2: TWO, 4: None},
    "lookups": {1: SUFFIX, 2: None, 3: {"kind": "prompt_lookup"}},
    "the latest phrases": {1: PHRASES, 2: SUFFIX | {"tree": True}},
    "a tree": {1: ANSWER_TREE, 3: chain(max_tokens=3)},
    "a schedule inside": {1: {"kind": "schedule", "ranges": {1: 4, 3: None}}, 2: 2, 5: 3},
}


def schedule(ranges):
    return configured({"kind": "schedule", "ranges": ranges})


@pytest.fixture(scope="module")
def answers_replay(tiny_pair, tmp_path_factory):
    texts = [f"x{n} = {n} + " * (1 + n % 3) for n in range(9)]
    return replay_of(tiny_pair, texts, tmp_path_factory.mktemp("recorded"), NEW_TOKENS)


def requests(answers_replay):
    prompts = answers_replay.recording.prompts.tokens
    return [Request(str(n), tuple(p.tolist()), NEW_TOKENS) for n, p in enumerate(prompts)]


@pytest.mark.parametrize("limits", [Limits(5), Limits(5, step_tokens=24, cache_tokens=512)])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_steps_of_answers_are_the_live_engines(kind, limits, answers_replay, tiny_pair):
    configuration = schedule(SCHEDULES[kind])
    answers = replayed_answers(answers_replay, configuration)
    used: set[int | None] = set()
    for clients in (1, 2, 5):
        engine = Engine(tiny_pair, configuration, limits=limits)
        live = LiveSteps(engine, requests(answers_replay), clients)
        assert simulated(answers, clients, limits)[0] == live.steps
        used |= {r.arm for g in live.generations.values() for r in g.rounds}
    assert len(used) > 1


def test_a_drafter_with_memory_is_exact_while_it_drafts_alone(answers_replay, tiny_pair):
    configuration = schedule({1: {"kind": "heuristic", "start": 3}, 2: None})
    answers = replayed_answers(answers_replay, configuration)
    live = LiveSteps(Engine(tiny_pair, configuration, 2), requests(answers_replay), 1)
    assert simulated(answers, 1, Limits(2))[0] == live.steps
    # With changes of the load it still answers everything.
    _, records = simulated(answers, 2, Limits(2))
    assert records["tokens"].tolist() == list(answers.lengths)


def test_ranges_within_ranges_are_ranges():
    found = drafters_by_load(schedule(SCHEDULES["a schedule inside"]).drafter)
    lengths = {n: each and each.depth for n, each in found.items()}
    assert lengths == {1: 4, 2: 2, 5: 3}


def test_an_engine_that_drafts_whole_chains_drafts_them_in_every_round(answers_replay):
    alone = replayed_answers(answers_replay, configured(chain(max_tokens=4)), whole=True).rounds[1]
    for first, *later in alone:
        assert (first.drafted, first.draft_forwards) == (0, 4)
        assert {(each.drafted, each.draft_forwards) for each in later} <= {(4, 4)}
    changing = schedule(SCHEDULES["chains"])
    by_load = replayed_answers(answers_replay, changing, whole=True)
    for least, most in {1: 4, 2: 2, 4: 0}.items():
        for answer in by_load.rounds[least]:
            assert {each.draft_forwards for each in answer} == {most}


@pytest.mark.parametrize(
    ("drafter", "by_load"),
    [
        (TWO, {1: {10}}),
        ({"kind": "schedule", "ranges": {1: TWO, 2: None}}, {1: {10}, 2: {0}}),
        ({"kind": "schedule", "ranges": {1: SUFFIX, 2: TWO}}, {1: {1000}, 2: {10}}),
        ({"kind": "bandit", "arms": [TWO, SUFFIX]}, {1: {0, 10, 1000}}),
    ],
)
def test_a_step_takes_the_time_of_what_proposes_in_it(drafter, by_load, answers_replay):
    times = ALWAYS_FREE.model_copy(update={"proposals": {"draft draft": 10.0, "suffix": 1000.0}})
    answers = replayed_answers(answers_replay, configured(drafter))
    costs, without = StepCosts(answers, times), StepCosts(answers, ALWAYS_FREE)
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


def test_everywhere_begins_at_every_position(answers_replay):
    for drafter in (None, chain(max_tokens=4), ANSWER_TREE, SUFFIX):
        configuration = configured(drafter)
        everywhere = answers_replay.everywhere(configuration)
        in_order = answers_replay.run(configuration)
        assert len(everywhere.prompt) == sum(map(len, answers_replay.recording.prompts.outputs))
        starts = zip(everywhere.prompt, everywhere.position, strict=True)
        begins = {p: n for n, p in enumerate(starts)}
        same = [begins[p] for p in zip(in_order.prompt, in_order.position, strict=True)]
        for name in ("drafted", "accepted", "generated", "draft_forwards", "draft_tokens"):
            assert np.array_equal(getattr(everywhere, name)[same], getattr(in_order, name))
