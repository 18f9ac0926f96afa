"""Only those still in question answer a load's requests again."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd

from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.search.load.comparison import LoadComparison
from specdec_core.search.load.live_race import LiveRace, looks_within
from specdec_core.search.load.live_runs import LiveRuns
from specdec_core.search.load.measures import COLUMNS
from specdec_core.search.load.workload import LiveSettings, Load

ONE = Load(clients=1, requests=24)
TWO, SIX, EIGHT = (
    Configuration(drafter=DraftModelSettings(policy=FixedSettings(max_tokens=k))) for k in (2, 6, 8)
)
FIELD = [AUTOREGRESSIVE, TWO, SIX, EIGHT]


class Clock:
    """Answers each request in a configuration's seconds, give or take; in three times as many in
    the first run of whom another process disturbed."""

    def __init__(self, seconds: dict[str, float], noise: float, disturbed: str | None) -> None:
        self.seconds, self.noise, self.disturbed = seconds, noise, disturbed
        self.runs: Counter[str] = Counter()
        self.warm: Counter[str] = Counter()

    def warm_up(self, configuration: Configuration, load: Load) -> None:
        self.warm[configuration.id] += 1

    def answer(self, configuration: Configuration, load: Load) -> pd.DataFrame:
        turn = self.runs[configuration.id]
        self.runs[configuration.id] += 1
        rng = np.random.default_rng([turn, FIELD.index(configuration)])
        pace = self.seconds[configuration.id]
        if not turn and configuration.id == self.disturbed:
            pace *= 3
        last = np.cumsum(pace * rng.normal(1, self.noise, load.requests))
        sent = [0.0, *last[:-1]]
        columns = zip(range(load.requests), sent, sent, last, strict=True)
        return pd.DataFrame([(*row, 5, 10, None) for row in columns], columns=list(COLUMNS))


def race(
    paces: tuple[float, ...],
    noise: float,
    disturbed: str | None = None,
    repeats: int = 3,
    cost: float = 0.01,
) -> tuple[LoadComparison, list[int]]:
    """What came out, and how many runs each had."""
    clock = Clock({each.id: s for each, s in zip(FIELD, paces, strict=True)}, noise, disturbed)
    settings, by = LiveSettings(repeats=repeats, cost=cost), "tokens_per_second"
    comparison = LiveRace(settings, clock, LiveRuns(), Observer(), by, None).run(ONE, FIELD)
    assert set(clock.warm.values()) == {1}
    counts = [clock.runs[each.id] for each in FIELD]
    assert counts == [len(comparison.runs[each.id]) for each in FIELD]
    return comparison, counts


def test_everyone_runs_twice_and_those_in_question_go_on() -> None:
    comparison, runs = race((2.0, 1.2, 1.0, 1.0), noise=0.1)
    assert runs == [2, 2, 3, 3]
    assert comparison.racing == [SIX.id, EIGHT.id]
    assert comparison.choose(comparison.racing) in (SIX.id, EIGHT.id)
    assert set(comparison.in_question(comparison.ids)) == {SIX.id, EIGHT.id}


def test_one_run_that_was_disturbed_puts_nobody_out() -> None:
    comparison, runs = race((2.0, 1.5, 1.0, 1.2), noise=0.01, disturbed=SIX.id, repeats=5)
    assert runs[FIELD.index(SIX)] > 2
    assert comparison.choose(comparison.racing) == SIX.id


def test_the_error_is_shared_among_the_looks() -> None:
    """So that all that it has seen before it stops holds together."""
    ids = [each.id for each in FIELD[2:]]
    settings = LiveSettings(repeats=6)
    seconds = dict.fromkeys((each.id for each in FIELD), 1.0)
    clock = Clock(seconds, noise=0.3, disturbed=None)
    race = LiveRace(settings, clock, LiveRuns(), Observer(), "tokens_per_second", None)
    comparison = race.run(ONE, FIELD[2:])
    single = LoadComparison(comparison.runs, ONE, "tokens_per_second")
    ratios = [each.ratio(*ids) for each in (single, comparison)]
    assert ratios[1].low < ratios[0].low < ratios[0].high < ratios[1].high


def test_a_race_ends_when_one_is_left_or_the_choice_costs_nothing() -> None:
    assert race((2.0, 1.5, 1.0, 1.5), noise=0.04, repeats=5)[1] == [2, 2, 2, 2]
    assert race((2.0, 1.002, 1.0, 1.001), noise=0.0005)[1] == [2, 2, 2, 2]
    assert race((1.0, 1.0, 1.0, 1.0), noise=0.1, repeats=1)[1] == [1, 1, 1, 1]


def test_a_race_goes_on_until_the_choice_is_shown_to_cost_no_more_than_it_may() -> None:
    near = (2.0, 1.4, 1.006, 1.0)
    close, runs = race(near, noise=0.03, repeats=28, cost=0.01)
    assert runs[:2] == [2, 2]
    assert 4 < runs[FIELD.index(EIGHT)] < 28
    assert close.decision()[1].high <= 0.01
    rough, fewer = race(near, noise=0.03, repeats=28, cost=0.02)
    assert 2 < fewer[FIELD.index(EIGHT)] < runs[FIELD.index(EIGHT)]
    assert 0.01 < rough.decision()[1].high <= 0.02


def test_looks_are_further_and_further_apart() -> None:
    assert [looks_within(n) for n in (1, 2, 3, 4, 13)] == [
        *([1], [2], [2, 3], [2, 3, 4], [2, 3, 4, 6, 9, 13])
    ]
