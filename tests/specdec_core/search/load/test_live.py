"""The simulation takes the live engine's steps: the same requests, chunks and candidates."""

import random

import pytest

from specdec_core.config import Configuration
from specdec_core.cost.forward import ForwardTerms
from specdec_core.cost.steps import StepTimes
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.search.load.answers import Answers, SimulatedRound
from specdec_core.search.load.live import run_arrivals
from specdec_core.search.load.simulator import RequestShape, simulate_clients
from specdec_core.search.load.step_costs import StepCosts
from tests.live_steps import LiveSteps
from tests.specdec_core.kinds import chain, configured

TIMES = StepTimes(target=ForwardTerms(fixed=0.01), drafts={"draft": ForwardTerms(fixed=0.001)})
CONFIGURATIONS = {
    "autoregressive": Configuration(),
    "draft": configured(chain(max_tokens=4)),
    "lookup": configured({"kind": "prompt_lookup"}),
}
LIMITS = {
    "roomy": Limits(3),
    "small steps": Limits(3, step_tokens=24),
    "shared prefixes": Limits(3, step_tokens=24, share_prefixes=True),
    "full cache": Limits(3, step_tokens=24, cache_tokens=320),
    "full shared cache": Limits(3, step_tokens=24, cache_tokens=320, share_prefixes=True),
}


def some_requests(count):
    rng = random.Random(0)
    common = tuple(rng.randrange(1, 200) for _ in range(30))
    return [
        Request(
            str(n),
            (
                *common[: rng.choice((0, 30))],
                *(rng.randrange(1, 200) for _ in range(rng.choice((3, 20, 70)))),
            ),
            rng.choice((5, 40, 90)),
        )
        for n in range(count)
    ]


def answers_of(generations, draft):
    rounds = [
        [SimulatedRound(r.drafted, r.generated, r.draft_forwards, r.draft_tokens) for r in g.rounds]
        for g in generations
    ]
    return Answers([g.prompt_tokens for g in generations], {1: rounds}, draft)


@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        ("autoregressive", "roomy"),
        ("draft", "small steps"),
        ("lookup", "shared prefixes"),
        ("draft", "full cache"),
        ("lookup", "full shared cache"),
        pytest.param("draft", "full shared cache", marks=pytest.mark.long),
        pytest.param("lookup", "full cache", marks=pytest.mark.long),
    ],
)
def test_the_steps_are_the_live_engines(kind, limits, tiny_pair):
    configuration, requests = CONFIGURATIONS[kind], some_requests(9)
    alone = Engine(tiny_pair, configuration).generate(requests)
    answers = answers_of(alone, "draft" if kind == "draft" else None)
    answers.texts = [(*r.tokens, *g.tokens) for r, g in zip(requests, alone, strict=True)]
    shapes = [RequestShape(n, len(r.tokens), len(alone[n].tokens)) for n, r in enumerate(requests)]
    for clients in (1, 4):
        engine = Engine(tiny_pair, configuration, limits=LIMITS[limits])
        live = LiveSteps(engine, requests, clients)
        simulated = simulate_clients(
            StepCosts(answers, TIMES), shapes, clients, LIMITS[limits], log=True
        )
        assert [step.plan for step in simulated.log] == live.plans
        assert [step.candidates for step in simulated.log] == live.candidates
        ours, theirs = simulated.records, live.records
        assert ours["tokens"].tolist() == theirs["tokens"].tolist()
        if "shared" in limits:
            assert engine.prefixes.hits > 0
        if clients == 4 and LIMITS[limits].cache_tokens:
            assert simulated.preemptions == engine.scheduler.preemptions > 0


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
    records = run_arrivals(Engine(tiny_pair, slots=2), requests, arrivals)
    assert records["sent"].tolist() == arrivals
    assert (records["first"] > records["sent"]).all()
    assert (records["last"] >= records["first"]).all()
    assert records["error"].isna().all()
