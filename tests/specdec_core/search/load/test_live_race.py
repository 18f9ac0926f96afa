"""Configurations at a load are compared by what their requests gained and cost, and only those in
question answer the requests again."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE
from specdec_core.search.load.live_race import LiveRace, LoadComparison
from specdec_core.search.load.measures import measure
from specdec_core.search.load.records import LoadRecord, records_frame
from specdec_core.search.load.workload import LiveSettings, Load, Slo
from tests.specdec_core.kinds import chain, configured

FOUR = Load(clients=4, requests=24)
TOKENS = 10


def record(index, sent, first, last):
    return LoadRecord(
        index=index, sent=sent, first=first, last=last, prompt_tokens=5, tokens=TOKENS
    )


def runs(seconds, noise=0.0, turns=3, requests=24):
    """Four clients that always wait; a request takes `seconds`, with noise."""
    rng = np.random.default_rng(int(1000 * seconds))
    each = []
    for _ in range(turns):
        sent, rows = [0.0] * 4, []
        for index in range(requests):
            client = int(np.argmin(sent))
            last = sent[client] + seconds * rng.normal(1, noise)
            rows.append(record(index, sent[client], sent[client] + 0.2 * seconds, last))
            sent[client] = last
        each.append(rows)
    return each


def test_tokens_a_second_of_clients_that_always_wait_are_those_of_the_run():
    comparison = LoadComparison({"a": runs(2.0), "b": runs(1.0)}, FOUR, "tokens_per_second")
    ratio = comparison.ratio("b", "a")
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2, 2, 2))
    whole = [measure(records_frame(runs(seconds)[0])).tokens_per_second for seconds in (1.0, 2.0)]
    assert ratio.value == pytest.approx(whole[0] / whole[1])
    assert comparison.ratio("a", "a").value == 1


def test_the_least_expected_cost_decides_and_what_is_kept_has_to_be_in_question_and_cost_little():
    noisy = {"slow": runs(2.0, 0.1), "fast": runs(1.0, 0.1), "same": runs(1.01, 0.1)}
    comparison = LoadComparison(noisy, FOUR, "tokens_per_second")
    assert set(comparison.in_question(noisy)) == {"fast", "same"}
    chosen = comparison.decision()[0]
    assert chosen in ("fast", "same")
    cost = comparison.cost(chosen, noisy)
    assert 0 <= cost.low <= cost.expected <= cost.high < 0.1
    assert comparison.cost("slow", noisy).expected == pytest.approx(0.5, abs=0.05)
    assert comparison.decision() == (chosen, comparison.cost(chosen, noisy))
    assert comparison.decision("slow", tolerance=1)[0] != "slow"
    (other,) = {"same", "fast"} - {chosen}
    cost = comparison.cost(other, noisy)
    assert comparison.decision(other, tolerance=0.5) == (other, cost)
    assert comparison.decision(other, tolerance=0.5, most=cost.high)[0] == other
    assert comparison.decision(other, tolerance=0.5, most=0.9 * cost.high)[0] == chosen
    assert comparison.decision(other, tolerance=0)[0] == chosen


def test_a_configuration_that_left_is_compared_over_the_turns_that_it_had():
    """The machine is three times slower from the third turn on."""
    measured = {"left": runs(1.1, turns=2), "stayed": [*runs(1.0, turns=2), *runs(3.0, turns=3)],
                "too": [*runs(1.0, turns=2), *runs(2.0, turns=3)]}  # fmt: skip
    comparison = LoadComparison(measured, FOUR, "tokens_per_second")
    ratio = comparison.ratio("stayed", "left")
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.1, 1.1, 1.1))
    assert comparison.cost("stayed", ["stayed", "left"]).high == 0
    # Configurations that had all turns are compared over all turns.
    assert comparison.racing == ["stayed", "too"]
    assert comparison.ratio("too", "stayed").value == pytest.approx(1.5)
    assert comparison.cost("stayed", comparison.racing).expected > 0.2


def test_goodput_counts_requests_within_the_objective():
    measured = {"late": runs(2.0), "in time": runs(1.0)}
    comparison = LoadComparison(measured, FOUR, "goodput", Slo(latency=1.5))
    assert comparison.ratio("in time", "late").value == float("inf")
    assert comparison.ratio("late", "in time").high == 0
    assert comparison.decision()[0] == "in time"
    nobody = LoadComparison(measured, FOUR, "goodput", Slo(latency=0.5))
    assert nobody.ratio("in time", "late").tied
    assert nobody.cost("late", measured).high == 0


def test_an_open_loop_has_a_share_of_its_requests_within_the_objective():
    load = Load(rate=3.0, requests=24)
    halves = [[*runs(1.0)[0][:12], *runs(2.0)[0][12:]]]
    comparison = LoadComparison({"half": halves, "all": runs(1.0, turns=1)}, load, "goodput",
                            Slo(latency=1.5))  # fmt: skip
    assert comparison.ratio("all", "half").value == pytest.approx(2)


ONE = Load(clients=1, requests=24)
TWO, SIX, EIGHT = (configured(chain(max_tokens=k)) for k in (2, 6, 8))
FIELD = [AUTOREGRESSIVE, TWO, SIX, EIGHT]


class Clock:
    """Answers each request in a configuration's seconds, with noise; in three times as many in the
    first run of the configuration that another process disturbed."""

    def __init__(self, seconds, noise, disturbed):
        self.seconds, self.noise, self.disturbed = seconds, noise, disturbed
        self.runs: Counter[str] = Counter()

    def answer(self, configuration, load):
        turn = self.runs[configuration.id]
        self.runs[configuration.id] += 1
        rng = np.random.default_rng([turn, FIELD.index(configuration)])
        pace = self.seconds[configuration.id]
        if not turn and configuration.id == self.disturbed:
            pace *= 3
        last = np.cumsum(pace * rng.normal(1, self.noise, load.requests))
        sent = [0.0, *last[:-1]]
        columns = zip(range(load.requests), sent, sent, last, strict=True)
        return [record(*row) for row in columns]


def race(paces, noise, disturbed=None, repeats=3, cost=0.01):
    """What came out, and how many runs each had."""
    clock = Clock({each.id: s for each, s in zip(FIELD, paces, strict=True)}, noise, disturbed)
    settings, by = LiveSettings(repeats=repeats, cost=cost), "tokens_per_second"
    with TemporaryDirectory() as folder:
        comparison = LiveRace(settings, clock, Path(folder), Observer(), by).run(ONE, FIELD)
    counts = [clock.runs[each.id] for each in FIELD]
    assert counts == [len(comparison.runs[each.id]) for each in FIELD]
    return comparison, counts


def test_every_configuration_runs_twice_and_those_in_question_go_on():
    comparison, runs = race((2.0, 1.2, 1.0, 1.0), noise=0.1)
    assert runs == [2, 2, 3, 3]
    assert comparison.racing == [SIX.id, EIGHT.id]
    assert comparison.decision()[0] in (SIX.id, EIGHT.id)
    assert set(comparison.in_question(comparison.runs)) == {SIX.id, EIGHT.id}


def test_one_run_that_was_disturbed_puts_no_configuration_out():
    comparison, runs = race((2.0, 1.5, 1.0, 1.2), noise=0.01, disturbed=SIX.id, repeats=5)
    assert runs[FIELD.index(SIX)] > 2
    assert comparison.decision()[0] == SIX.id


def test_the_error_is_shared_among_the_looks(tmp_path):
    """So that all that it has seen before it stops holds together."""
    ids = [each.id for each in FIELD[2:]]
    settings = LiveSettings(repeats=6)
    seconds = dict.fromkeys((each.id for each in FIELD), 1.0)
    clock = Clock(seconds, noise=0.3, disturbed=None)
    race = LiveRace(settings, clock, tmp_path, Observer(), "tokens_per_second")
    comparison = race.run(ONE, FIELD[2:])
    single = LoadComparison(comparison.runs, ONE, "tokens_per_second")
    ratios = [each.ratio(*ids) for each in (single, comparison)]
    assert ratios[1].low < ratios[0].low < ratios[0].high < ratios[1].high


def test_a_race_ends_when_one_is_left_or_the_choice_costs_nothing():
    assert race((2.0, 1.5, 1.0, 1.5), noise=0.04, repeats=5)[1] == [2, 2, 2, 2]
    assert race((2.0, 1.002, 1.0, 1.001), noise=0.0005)[1] == [2, 2, 2, 2]
    assert race((1.0, 1.0, 1.0, 1.0), noise=0.1, repeats=1)[1] == [1, 1, 1, 1]


def test_a_race_goes_on_until_the_choice_is_shown_to_cost_no_more_than_it_may():
    near = (2.0, 1.4, 1.006, 1.0)
    close, runs = race(near, noise=0.03, repeats=28, cost=0.01)
    assert runs[:2] == [2, 2]
    assert 4 < runs[FIELD.index(EIGHT)] < 28
    assert close.decision()[1].high <= 0.01
    rough, fewer = race(near, noise=0.03, repeats=28, cost=0.02)
    assert 2 < fewer[FIELD.index(EIGHT)] < runs[FIELD.index(EIGHT)]
    assert 0.01 < rough.decision()[1].high <= 0.02
