"""The fewest replicas and the greatest rate are those at which the limits are just kept."""

import pytest

from specdec_core.cost.forward import ForwardTerms
from specdec_core.cost.steps import StepTimes
from specdec_core.engine.scheduler import Limits
from specdec_core.search.load.answers import Answers, SimulatedRound
from specdec_core.search.load.capacity import ServedTraffic, greatest_rate, least_replicas
from specdec_core.search.load.measures import measure
from specdec_core.search.load.trace import TraceRequest
from specdec_core.search.load.workload import Slo

T = 0.01
TIMES = StepTimes(target=ForwardTerms(fixed=T))
TEN = Answers([10], {1: [[SimulatedRound(0, 1, 0, 0)] * 10]}, None)  # an answer takes 10 steps
SLO = Slo(ttft=0.05)


def service(slots=2):
    return ServedTraffic(TEN, TIMES, Limits(slots), seconds=5)


def test_the_fewest_replicas_are_enough_and_one_less_is_not():
    rate = 100.0  # two slots answer 20 a second: five replicas are needed to keep up
    found = least_replicas(service(), rate, SLO)
    fewest = found.chosen.replicas
    assert fewest >= 5
    assert found.chosen.measures.good_share >= found.share
    assert service().simulate(rate, fewest - 1).measure(SLO).good_share < found.share
    tried = found.frame()
    assert tried["replicas"].is_monotonic_increasing
    assert tried["replicas"].is_unique


def test_what_cannot_be_kept_alone_is_kept_by_no_number():
    found = least_replicas(service(), 10, Slo(tpot=T / 2))
    assert found.chosen is None
    assert found.alone.measures.good_share == 0
    assert found.alone.measures.value("tpot", 95) == pytest.approx(T)
    assert found.frame().empty
    assert greatest_rate(service(), 3, Slo(tpot=T / 2)).chosen is None


def test_a_queue_that_grows_is_not_carried_where_the_limits_leave_waiting_out():
    found = least_replicas(service(), 101, Slo(tpot=2 * T))
    assert found.chosen.replicas == 6  # five answer 100 a second
    found = greatest_rate(service(), 4, Slo(tpot=2 * T))
    assert 0.97 * 4 * 20 < found.chosen.rate < 4 * 20
    # Nor where the limit is longer than the queue is after the seconds that are simulated.
    found = greatest_rate(service(), 4, Slo(ttft=60))
    assert found.chosen.rate < 4 * 20


def test_as_many_replicas_as_keep_up_are_found_however_short_the_simulation():
    short = ServedTraffic(TEN, TIMES, Limits(2), seconds=0.01)
    found = least_replicas(short, 2_010, Slo(tpot=2 * T))
    assert found.chosen.replicas == 101


def test_what_keeps_the_limits_for_long_answers_keeps_them_in_the_long_run():
    """For as long as answers take replicas fill, and at the end they empty."""
    slow = StepTimes(target=ForwardTerms(fixed=70 * T, per_row=7 * T))
    long = ServedTraffic(TEN, slow, Limits(16), arrivals="constant")  # an answer takes 8 to 18 s
    slo = Slo(tpot=140 * T)
    for found in (least_replicas(long, 20, slo), greatest_rate(long, 16, slo)):
        assert found.chosen is not None
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
    assert found.alone.measures.value("latency", 50) == pytest.approx(20 * T)
    found = least_replicas(asked, 100, Slo(latency=1))
    assert found.chosen.replicas == 1


def test_a_traces_queue_is_over_by_its_end_where_no_limit_counts_waiting():
    """A replica answers 10 requests a second, of the 15 that come."""
    asked = of_trace(n / 15 for n in range(100))
    for slo, replicas in (
        (Slo(tpot=2 * T), 2),
        (Slo(tpot=2 * T, ttft=60), 1),
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
        rates.append(rate)
    # More replicas share the load better than one that is busy by chance.
    assert rates[1] > 4 * rates[0]


def test_a_try_has_the_share_of_busy_replicas():
    found = greatest_rate(service(slots=1), 2, SLO)
    row = found.chosen.row
    assert 0 < row["busy"] <= 1
    assert row["ttft_p50"] <= row["ttft_p95"] <= row["ttft_p99"]
