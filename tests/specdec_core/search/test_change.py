"""A change is found, and a false alarm is as rare as is promised, whatever the values are."""

from __future__ import annotations

from random import Random

import pytest

from specdec_core.search import change
from specdec_core.search.change import RECENT, Change, ChangeDetector

BETWEEN, LENGTH, RUNS = 500, 100, 300


def values(kind: str, random: Random, count: int) -> list[float]:
    if kind == "two":
        return [float(random.random() < 0.3) for _ in range(count)]
    return [random.betavariate(2, 5) for _ in range(count)]


def first_alarm(stream: list[float], between: float, seed: int) -> Change | None:
    detector = ChangeDetector(0, 1, between, seed)
    return next((found for value in stream if (found := detector.add(value))), None)


def false_alarms(kind: str) -> float:
    random = Random(0)
    streams = (values(kind, random, LENGTH) for _ in range(RUNS))
    return sum(first_alarm(s, BETWEEN, n) is not None for n, s in enumerate(streams)) / RUNS


@pytest.mark.parametrize("kind", ["two", "skewed"])
def test_false_alarms_are_as_rare_as_promised(kind: str) -> None:
    """At most 100 / 500 = 0.2 of the runs, plus 3 standard errors of 300 runs (0.07)."""
    assert false_alarms(kind) <= LENGTH / BETWEEN + 0.07


def test_ranks_that_favour_small_values_would_be_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bug: ties are not broken at random."""
    monkeypatch.setattr(Random, "random", lambda _: 0.0)
    detector = ChangeDetector(0, 1, BETWEEN)
    assert any(detector.add(0.5) for _ in range(LENGTH))


def test_expected_capital_is_one_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all orders of two values and a grid of tie breaks, that of ranks is 2 after two."""
    for bet in change.BETS:
        factors = [1 + bet * ((k + 0.5) / 100 - 0.5) for k in range(100)]
        assert sum(factors) / 100 == pytest.approx(1)
    monkeypatch.setattr(change, "BETS", (-1.0, 1.0))
    random, total = Random(1), 0.0
    for seed in range(4000):
        detector = ChangeDetector(0, 1, 1e9, seed)
        for value in values("two", random, 5):
            detector.add(value)
        total += detector.evidence * 1e9
    assert total / 4000 == pytest.approx(5, rel=0.03)


@pytest.mark.parametrize("mean", [0.35, 0.75])
def test_a_change_of_the_acceptance_is_found_soon(mean: float) -> None:
    """From a mean of 0.55 (standard deviation 0.15) after 300 requests."""
    delays = []
    for seed in range(20):
        random = Random(seed)
        stream = [random.gauss(0.55, 0.15) for _ in range(300)]
        stream += [random.gauss(mean, 0.15) for _ in range(300)]
        found = first_alarm(stream, 100_000, seed)
        assert found is not None
        delays.append(found.count - 300)
        if found.count >= 300 + RECENT:
            assert found.after == pytest.approx(mean, abs=0.08)
            assert found.before == pytest.approx(0.55, abs=0.05)
    assert min(delays) > 0
    assert sorted(delays)[10] < 60


def test_it_begins_anew_after_an_alarm() -> None:
    detector, random = ChangeDetector(0, 1, 1000), Random(3)
    alarms = 0
    for level in (0.2, 0.8, 0.2):
        for _ in range(200):
            alarms += detector.add(random.gauss(level, 0.05)) is not None
    assert alarms == 2
