"""A simulation does what its times and rounds say, whatever the load."""

import pytest

from specdec_core.cost import Hardware
from specdec_core.cost.forward import FEW, ForwardTerms, Work
from specdec_core.cost.steps import StepTimes
from specdec_core.engine.scheduler import Limits
from specdec_core.search.load.answers import Answers, SimulatedRound
from specdec_core.search.load.simulator import (
    RequestShape,
    shapes_of,
    shapes_of_trace,
    simulate_arrivals,
    simulate_clients,
)
from specdec_core.search.load.step_costs import State, StepCosts
from specdec_core.search.load.trace import TraceRequest
from specdec_core.search.load.workload import arrival_times

T = 0.01
CONSTANT = StepTimes(target=ForwardTerms(fixed=T), drafts={"draft": ForwardTerms(fixed=T / 10)})
ALONE = SimulatedRound(drafted=0, generated=1, draft_forwards=0, draft_tokens=0)
FOUR = SimulatedRound(drafted=3, generated=4, draft_forwards=3, draft_tokens=3)
MEDIUM, SMALL = FOUR._replace(draft="medium"), FOUR._replace(draft="small")
TWO_DRAFTS = {"medium": ForwardTerms(fixed=0.1), "small": ForwardTerms(fixed=0.001)}
Rows = list[list[float]]


def autoregressive(prompt=10, tokens=5):
    return Answers([prompt], {1: [[ALONE] * tokens]}, None)


def drafted(prompt=10, rounds=3):
    return Answers([prompt], {1: [[ALONE, *[FOUR] * rounds]]}, "draft")


def clients(answers, number, count, **limits):
    limit = Limits(**{"slots": 4, **limits})
    return simulate_clients(StepCosts(answers, CONSTANT), shapes_of(answers, count), number, limit)


def arriving(answers, arrivals, slots, replicas=1):
    costs, shapes = StepCosts(answers, CONSTANT), shapes_of(answers, len(arrivals))
    return simulate_arrivals(costs, shapes, arrivals, Limits(slots), replicas)


def times(simulation):
    return simulation.records[["sent", "first", "last"]].to_numpy().tolist()


def test_a_request_takes_its_steps():
    simulation = clients(autoregressive(), 1, 2)
    # The prompt is read in the step of the first token.
    assert times(simulation)[0] == pytest.approx([0, T, 5 * T])
    assert times(simulation)[1] == pytest.approx([5 * T, 6 * T, 10 * T])
    assert simulation.steps == 10
    assert simulation.seconds == pytest.approx(10 * T)
    assert simulation.busy == [pytest.approx(1)]


def test_one_forward_reads_a_prompt_to_its_end_unless_rows_are_padded_to_it():
    answers = autoregressive()
    for mixes, together, first in ((True, 1, T), (False, 1, T), (True, 2, T), (False, 2, 2 * T)):
        costs = CONSTANT.model_copy(update={"mixes": mixes})
        shapes = shapes_of(answers, together)
        simulation = simulate_clients(StepCosts(answers, costs), shapes, together, Limits(together))
        assert times(simulation) == [pytest.approx([0, first, first + 4 * T])] * together


def test_the_first_token_does_not_wait_for_the_draft():
    simulation = clients(drafted(rounds=1), 1, 1)
    # The draft prefills the prompt in the second step.
    assert times(simulation)[0] == pytest.approx([0, T, 2 * T + T / 10 + 3 * T / 10])


def test_what_the_engine_adds_is_counted():
    costs = CONSTANT.model_copy(update={"per_step": 1, "per_row": 10})
    answers = drafted(rounds=1)
    forwards = 2 * T + 4 * T / 10  # one of each model prefills the prompts
    simulation = simulate_clients(StepCosts(answers, costs), shapes_of(answers, 2), 2, Limits(2))
    assert simulation.seconds == pytest.approx(forwards + 2 * (1 + 2 * 10))


def test_steps_without_candidates_have_a_time_of_their_own():
    costs = CONSTANT.model_copy(update={"autoregressive": ForwardTerms(fixed=T / 2)})
    for answers, seconds in ((autoregressive(), 5 * T / 2), (drafted(rounds=1), T / 2 + 1.4 * T)):
        simulation = simulate_clients(
            StepCosts(answers, costs), shapes_of(answers, 1), 1, Limits(2)
        )
        assert simulation.seconds == pytest.approx(seconds)


def test_another_machines_time_alone_is_that_of_steps_without_candidates():
    machine = {"name": "far", "target": {"speculative": 0.2, "alone": 0.1}, "drafts": {"*": 0.01}}
    profile = Hardware.model_validate(machine).profile(["draft"])
    costs = StepTimes.of(profile)
    lookup = FOUR._replace(draft_forwards=0, draft_tokens=0)
    for rounds in ([ALONE] * 5, [ALONE, lookup, ALONE, lookup], [ALONE, FOUR, FOUR]):
        answers = Answers([10], {1: [rounds]}, "draft")
        answers.lazy = True  # no separate forward prefills the prompt
        simulation = simulate_clients(
            StepCosts(answers, costs), shapes_of(answers, 1), 1, Limits(2)
        )
        expected = [profile.round_seconds(r.drafted, r.draft_forwards, 0, "draft") for r in rounds]
        assert simulation.seconds == pytest.approx(sum(expected))
    assert profile.autoregressive_seconds(5) == pytest.approx(5 * 0.1)


def test_each_of_several_drafts_takes_its_own_time():
    costs = CONSTANT.model_copy(update={"drafts": TWO_DRAFTS})
    rounds = [[ALONE, MEDIUM, SMALL], [ALONE, SMALL, SMALL]]
    answers = Answers([10, 10], {1: rounds}, "medium")
    answers.lazy = True
    for shapes, draft_seconds in (
        ([RequestShape(0, 10, 9)], 3 * 0.1 + 3 * 0.001),
        ([RequestShape(1, 10, 9)], 6 * 0.001),
        # The drafts of a step take turns.
        ([RequestShape(0, 10, 9), RequestShape(1, 10, 9)], 3 * 0.1 + 6 * 0.001),
    ):
        simulation = simulate_clients(StepCosts(answers, costs), shapes, len(shapes), Limits(2))
        assert simulation.seconds == pytest.approx(3 * T + draft_seconds)


def test_a_schedule_takes_the_times_of_the_range_that_drafts():
    costs = CONSTANT.model_copy(update={"drafts": TWO_DRAFTS})
    medium, small = ([[ALONE, *[each] * 8]] for each in (MEDIUM, SMALL))
    schedule = Answers([10], {1: medium, 8: small}, "medium", by_position=True, lazy=True)
    for number, alone in ((8, small), (7, medium)):
        taken = [
            simulate_clients(
                StepCosts(each, costs), shapes_of(each, 2 * number), number, Limits(8)
            ).seconds
            for each in (
                schedule,
                Answers([10], {1: alone}, alone[0][1].draft, by_position=True, lazy=True),
            )
        ]
        assert taken[0] == pytest.approx(taken[1])


def test_an_open_loop_does_not_wait_for_answers():
    arrivals = [0.0, 1.0, 1.0, 1.005]
    simulation = arriving(autoregressive(), arrivals, 4)
    assert simulation.records["sent"].tolist() == arrivals
    # One that comes within a step is served from the next one on.
    assert simulation.records["first"].tolist() == pytest.approx([T, 1 + T, 1 + T, 1 + 2 * T])
    assert sum(simulation.busy) == pytest.approx(11 * T / simulation.seconds)


def test_an_answer_longer_than_the_recorded_one_begins_it_again():
    answers = drafted(rounds=1)
    trace = [
        TraceRequest(arrival=0, prompt_tokens=99, output_tokens=12),
        TraceRequest(arrival=0, prompt_tokens=10, max_new_tokens=2),
        TraceRequest(arrival=0, prompt_tokens=10),
    ]
    shapes = shapes_of_trace(answers, trace, new_tokens=64)
    assert shapes == [RequestShape(0, 99, 12), RequestShape(0, 10, 2), RequestShape(0, 10, 5)]
    simulation = simulate_arrivals(
        StepCosts(answers, CONSTANT), shapes, [0.0] * 3, Limits(4), log=True
    )
    assert simulation.records["tokens"].tolist() == [12, 2, 5]
    assert simulation.rounds == 4 + 2 + 2, "there is but one first round"


def test_an_answer_that_ended_by_itself_ends_there_in_a_trace_too():
    recorded = autoregressive(tokens=5)
    for most, told, tokens in ((30, None, 5), (3, None, 3), (30, 12, 12), (8, 12, 8)):
        [shape] = shapes_of_trace(recorded, [request(most, told)], new_tokens=64)
        assert shape.most == tokens
    # One that was cut where the recording ends continues as far as it may.
    [cut] = shapes_of_trace(recorded, [request(30)], new_tokens=5)
    assert cut.most == 30


def request(most, told=None):
    return TraceRequest(arrival=0, prompt_tokens=10, max_new_tokens=most, output_tokens=told)


def test_requests_spread_over_the_replicas():
    simulation = arriving(autoregressive(), arrival_times(100, 300).tolist(), 2, 4)
    assert len(simulation.records) == 300
    assert len(simulation.busy) == 4
    assert min(simulation.busy) > 0.5 * max(simulation.busy)


TERMS = ForwardTerms(
    fixed=0.01,
    per_row=0.001,
    per_token=1e-4,
    per_cached=1e-6,
    per_pair=1e-7,
    per_few_pair=1e-7,
    per_token_beyond=1e-4,
    knee=6,
)
UNEVEN = StepTimes(
    target=TERMS,
    autoregressive=TERMS.model_copy(update={"fixed": 0.007}),
    drafts={name: TERMS.model_copy(update={"fixed": 0.001}) for name in ("medium", "small")},
    per_step=1e-4,
    per_row=1e-5,
)


def test_a_step_costs_what_its_rows_add_up_to():
    answers = Answers([40, 300], {1: [[ALONE, MEDIUM, SMALL], [ALONE, SMALL, FOUR]]}, "medium")
    answers.lazy = True
    costs = StepCosts(answers, UNEVEN)
    medium, small = (
        costs.round(RequestShape(answer, prompt, 90), 2, State(1, 1, prompt, (0, 0)))
        for answer, prompt in ((0, 40), (1, 300))
    )
    assert (medium.after, medium.drafted) == (State(5, 2, 44, (43, 0)), 3)
    target = UNEVEN.target.seconds(Work.of([(4, 40), (4, 300)]))
    # A draft prefills the sequence in its first forward, and feeds a token in each further one.
    drafts = sum(
        3 * (TERMS.per_row + 0.001 + TERMS.per_cached)  # at half of its context
        + (TERMS.per_token + TERMS.per_pair) * (length + 3)
        + TERMS.per_token_beyond * (length + 3 - 3 * TERMS.knee)
        + (TERMS.per_few_pair * (length + 3) if length + 3 < 3 * FEW else 0)
        for length in (40, 300)
    )
    engine = 1e-4 + 2 * 1e-5
    assert costs.seconds([medium.share, small.share]) == pytest.approx(target + drafts + engine)
    reading = [costs.prefill_share(*row) for row in ((7, 0), (20, 64))]
    assert costs.prefill(reading) == pytest.approx(
        UNEVEN.verifying(candidates=False).seconds(Work.of([(7, 0), (20, 64)]))
    )


def test_a_prompt_that_is_read_apart_is_not_in_the_cache_before():
    target = ForwardTerms(per_cached=1.0)
    answers = autoregressive(prompt=10, tokens=1)
    costs = StepCosts(answers, CONSTANT.model_copy(update={"target": target, "mixes": False}))
    simulation = simulate_clients(costs, shapes_of(answers, 2), 2, Limits(2))
    # A forward reads nine tokens of each, and one the last.
    assert simulation.seconds == pytest.approx(2 * 9)
