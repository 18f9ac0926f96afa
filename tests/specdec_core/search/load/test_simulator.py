"""The simulator of load, and the capacity that it finds."""

import pytest

from specdec_core.cost.forward import FEW, ForwardTerms, Work
from specdec_core.cost.steps import StepTimes
from specdec_core.engine.scheduler import Limits
from specdec_core.search.load.answers import Answers, SimulatedRound
from specdec_core.search.load.capacity import ServedTraffic, greatest_rate, least_replicas
from specdec_core.search.load.measures import measure
from specdec_core.search.load.simulator import (
    RequestShape,
    shapes_of,
    simulate_arrivals,
    simulate_clients,
)
from specdec_core.search.load.step_costs import State, StepCosts
from specdec_core.search.load.trace import TraceRequest
from specdec_core.search.load.workload import Slo, arrival_times
from tests.specdec_core.cost.examples import constant_profile

T = 0.01
CONSTANT = StepTimes(target=ForwardTerms(fixed=T), drafts={"draft": ForwardTerms(fixed=T / 10)})
ALONE = SimulatedRound(drafted=0, generated=1, draft_forwards=0, draft_tokens=0, depth=0)
FOUR = SimulatedRound(drafted=3, generated=4, draft_forwards=3, draft_tokens=3, depth=3)
MEDIUM, SMALL = FOUR._replace(draft="medium"), FOUR._replace(draft="small")
TWO_DRAFTS = {"medium": ForwardTerms(fixed=0.1), "small": ForwardTerms(fixed=0.001)}


def autoregressive(prompt=10, tokens=5):
    return Answers([prompt], {1: [[ALONE] * tokens]}, None)


def drafted(prompt=10, rounds=3):
    return Answers([prompt], {1: [[ALONE, *[FOUR] * rounds]]}, "draft")


def clients(answers, number, count, times=CONSTANT):
    costs, shapes = StepCosts(answers, times), shapes_of(answers, count)
    return simulate_clients(costs, shapes, number, Limits(8))


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
        simulation = clients(answers, together, together, costs)
        assert times(simulation) == [pytest.approx([0, first, first + 4 * T])] * together


def test_the_first_token_does_not_wait_for_the_draft():
    simulation = clients(drafted(rounds=1), 1, 1)
    # The draft prefills the prompt in the second step.
    assert times(simulation)[0] == pytest.approx([0, T, 2 * T + T / 10 + 3 * T / 10])


def test_what_the_engine_adds_is_counted():
    costs = CONSTANT.model_copy(update={"per_step": 1, "per_row": 10})
    forwards = 2 * T + 4 * T / 10  # one of each model prefills the prompts
    simulation = clients(drafted(rounds=1), 2, 2, costs)
    assert simulation.seconds == pytest.approx(forwards + 2 * (1 + 2 * 10))


def test_steps_without_candidates_have_a_time_of_their_own():
    costs = CONSTANT.model_copy(update={"autoregressive": ForwardTerms(fixed=T / 2)})
    for answers, seconds in ((autoregressive(), 5 * T / 2), (drafted(rounds=1), T / 2 + 1.4 * T)):
        simulation = clients(answers, 1, 1, costs)
        assert simulation.seconds == pytest.approx(seconds)


def test_another_machines_time_alone_is_that_of_steps_without_candidates():
    profile = constant_profile(0.2, 0.01, autoregressive_forward=0.1)
    costs = StepTimes.of(profile)
    lookup = FOUR._replace(draft_forwards=0, draft_tokens=0)
    for rounds in ([ALONE] * 5, [ALONE, lookup, ALONE, lookup], [ALONE, FOUR, FOUR]):
        answers = Answers([10], {1: [rounds]}, "draft")
        answers.lazy = True  # no separate forward prefills the prompt
        simulation = clients(answers, 1, 1, costs)
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
            clients(each, number, 2 * number, costs).seconds
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
    shapes = shapes_of(answers, len(trace), trace, new_tokens=64)
    assert shapes == [RequestShape(0, 99, 12), RequestShape(0, 10, 2), RequestShape(0, 10, 5)]
    simulation = simulate_arrivals(StepCosts(answers, CONSTANT), shapes, [0.0] * 3, Limits(4))
    assert simulation.records["tokens"].tolist() == [12, 2, 5]
    assert simulation.steps == 4, "there is but one first round"


def test_an_answer_that_ended_by_itself_ends_there_in_a_trace_too():
    recorded = autoregressive(tokens=5)
    for most, told, tokens in ((30, None, 5), (3, None, 3), (30, 12, 12), (8, 12, 8)):
        [shape] = shapes_of(recorded, 1, [request(most, told)], new_tokens=64)
        assert shape.most == tokens
    # One that was cut where the recording ends continues as far as it may.
    [cut] = shapes_of(recorded, 1, [request(30)], new_tokens=5)
    assert cut.most == 30


def request(most, told=None):
    return TraceRequest(arrival=0, prompt_tokens=10, max_new_tokens=most, output_tokens=told)


def test_requests_spread_over_the_replicas():
    simulation = arriving(autoregressive(), arrival_times(100, 300).tolist(), 2, 4)
    assert len(simulation.records) == 300
    assert len(simulation.busy) == 4
    assert min(simulation.busy) > 0.5 * max(simulation.busy)


def test_a_request_goes_to_the_least_busy_replica():
    """Nobody waits while another replica is free, however many there are."""
    crowd = arriving(autoregressive(), [0.0] * 9 + [0.001], 1, 10)
    assert len({last - sent for sent, _, last in times(crowd)}) == 1
    assert min(crowd.busy) > 0


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
        UNEVEN.autoregressive.seconds(Work.of([(7, 0), (20, 64)]))
    )


def test_guesses_that_a_draft_verified_are_in_its_cache():
    """A cascade verifies several guesses in a forward."""
    two = SimulatedRound(drafted=6, generated=5, draft_forwards=2, draft_tokens=7, depth=6)
    costs = StepCosts(Answers([40], {1: [[ALONE, two]]}, "medium"), UNEVEN)
    after = costs.round(RequestShape(0, 40, 90), 1, State(1, 1, 40, (40,))).after
    assert after.read == (45,)  # the sequence but its last token, and what was accepted


def test_a_prompt_that_is_read_apart_is_not_in_the_cache_before():
    target = ForwardTerms(per_cached=1.0)
    costs = CONSTANT.model_copy(update={"target": target, "mixes": False})
    simulation = clients(autoregressive(prompt=10, tokens=1), 2, 2, costs)
    # A forward reads nine tokens of each, and one the last.
    assert simulation.seconds == pytest.approx(2 * 9)


CAPACITY_T = 0.01
TIMES = StepTimes(target=ForwardTerms(fixed=CAPACITY_T))
TEN = Answers([10], {1: [[SimulatedRound(0, 1, 0, 0, 0)] * 10]}, None)  # an answer takes 10 steps
SLO = Slo(ttft=0.05)


def service(slots=2):
    return ServedTraffic(TEN, TIMES, Limits(slots), seconds=5)


def test_the_fewest_replicas_are_enough_and_one_less_is_not():
    rate = 100.0  # two slots answer 20 a second: five replicas are needed to keep up
    found = least_replicas(service(), rate, SLO)
    fewest = found.chosen.replicas
    assert fewest >= 5
    assert found.chosen.measures.good_share >= found.share
    assert measure(service().simulate(rate, fewest - 1).records, SLO).good_share < found.share
    tried = found.frame()
    assert tried["replicas"].is_monotonic_increasing
    assert tried["replicas"].is_unique


def test_what_cannot_be_kept_alone_is_kept_by_no_number():
    found = least_replicas(service(), 10, Slo(tpot=CAPACITY_T / 2))
    assert found.chosen is None
    assert found.alone.measures.good_share == 0
    assert found.alone.measures.value("tpot", 95) == pytest.approx(CAPACITY_T)
    assert found.frame().empty
    assert greatest_rate(service(), 3, Slo(tpot=CAPACITY_T / 2)).chosen is None


def test_the_search_for_a_rate_ends_where_only_requests_that_do_not_count_keep_the_limit():
    """Of the 500 requests 25 are too long, just few enough; but all of these are steady ones."""
    tokens = [20 if 200 <= n < 225 else 10 for n in range(500)]
    answers = Answers([10] * 500, {1: [[ALONE] * each for each in tokens]}, None)
    mixed = ServedTraffic(answers, TIMES, Limits(2), arrivals="constant", seconds=5)
    found = greatest_rate(mixed, 1, Slo(latency=15 * CAPACITY_T))
    assert found.possible
    assert found.chosen is None
    assert len(found.tried) < 20


def test_a_queue_that_grows_is_not_carried_where_the_limits_leave_waiting_out():
    found = least_replicas(service(), 101, Slo(tpot=2 * CAPACITY_T))
    assert found.chosen.replicas == 6  # five answer 100 a second
    found = greatest_rate(service(), 4, Slo(tpot=2 * CAPACITY_T))
    assert 0.97 * 4 * 20 < found.chosen.rate < 4 * 20
    # Nor where the limit is longer than the queue is after the seconds that are simulated.
    found = greatest_rate(service(), 4, Slo(ttft=60))
    assert found.chosen.rate < 4 * 20


def test_as_many_replicas_as_keep_up_are_found_however_short_the_simulation():
    short = ServedTraffic(TEN, TIMES, Limits(2), seconds=0.01)
    found = least_replicas(short, 2_010, Slo(tpot=2 * CAPACITY_T))
    assert found.chosen.replicas == 101


def test_what_keeps_the_limits_for_long_answers_keeps_them_in_the_long_run():
    """For as long as answers take replicas fill, and at the end they empty."""
    slow = StepTimes(target=ForwardTerms(fixed=70 * CAPACITY_T, per_row=7 * CAPACITY_T))
    long = ServedTraffic(TEN, slow, Limits(16), arrivals="constant")  # an answer takes 8 to 18 s
    slo = Slo(tpot=140 * CAPACITY_T)
    for found in (least_replicas(long, 20, slo), greatest_rate(long, 16, slo)):
        assert found.seconds > 100 > long.seconds
        row = found.chosen
        later = long.simulate(row.rate, row.replicas, 10 * found.seconds).records
        assert measure(later[later["sent"] > found.seconds], slo).good_share >= found.share


def of_trace(arrivals, **more):
    """Replicas that answer one request at a time."""
    asked = (TraceRequest(arrival=each, prompt_tokens=10, **more) for each in arrivals)
    return ServedTraffic(TEN, TIMES, Limits(1), trace=tuple(asked))


def test_the_beginning_of_a_trace_counts():
    """Four of its twenty requests come at once; the other sixteen one by one."""
    found = least_replicas(of_trace([0] * 4 + list(range(10, 26))), 1, SLO)
    assert found.chosen.replicas == 3, "with two, two of them wait for the others"
    assert found.chosen.measures.requests == 20


def test_a_trace_is_judged_by_its_own_requests_to_its_end():
    """Alone, too: its answers take longer than the recorded ones. It comes faster than a replica
    answers, but ends."""
    asked = of_trace([0, 0.01, 0.02, 0.03], output_tokens=20)
    found = least_replicas(asked, 100, Slo(latency=0.15))
    assert found.chosen is None
    assert found.alone.measures.value("latency", 50) == pytest.approx(20 * CAPACITY_T)
    found = least_replicas(asked, 100, Slo(latency=1))
    assert found.chosen.replicas == 1


def test_a_traces_queue_is_over_by_its_end_where_no_limit_counts_waiting():
    """A replica answers 10 requests a second, of the 15 that come."""
    asked = of_trace(n / 15 for n in range(100))
    for slo, replicas in (
        (Slo(tpot=2 * CAPACITY_T), 2),
        (Slo(tpot=2 * CAPACITY_T, ttft=60), 1),
        (Slo(latency=60), 1),
    ):
        found = least_replicas(asked, 15, slo)
        assert found.chosen.replicas == replicas
    assert found.chosen.waiting > 20


def test_the_greatest_rate_grows_with_the_replicas():
    rates = []
    for replicas in (1, 4):
        found = greatest_rate(service(), replicas, SLO)
        rate = found.chosen.rate
        assert found.chosen.measures.good_share >= found.share
        assert rate < 20 * replicas  # what its slots could answer at most
        assert 0 < (row := found.chosen.row)["busy"] <= 1
        assert row["ttft_p50"] <= row["ttft_p95"] <= row["ttft_p99"]
        rates.append(rate)
    # More replicas share the load better than one that is busy by chance.
    assert rates[1] > 4 * rates[0]
