"""A change that matters is found, and a false alarm is as rare as is promised, whatever the values
are."""

from random import Random

import pytest
from scipy.integrate import quad

from specdec_core.search import change
from specdec_core.search.change import ChangeDetector

BETWEEN, LENGTH, RUNS = 500, 100, 300


def values(kind, random, count):
    if kind == "two":
        return [float(random.random() < 0.3) for _ in range(count)]
    return [random.betavariate(2, 5) for _ in range(count)]


def alarms(detector, stream, share):
    """Each alarm, and how many values there had been."""
    found = ((n, detector.add(value, share)) for n, value in enumerate(stream, 1))
    return [(n, alarm) for n, alarm in found if alarm is not None]


def false_alarms(kind):
    random = Random(0)
    detectors = (ChangeDetector(0, 1, 0.0, seed) for seed in range(RUNS))
    streams = (values(kind, random, LENGTH) for _ in range(RUNS))
    pairs = zip(detectors, streams, strict=True)
    return sum(len(alarms(*pair, 1 / BETWEEN)) for pair in pairs) / RUNS


@pytest.mark.parametrize("kind", ["two", "skewed"])
def test_false_alarms_are_as_rare_as_promised(kind):
    """At most 100 / 500 = 0.2 a run, plus 3 standard errors of 300 runs (0.08)."""
    assert false_alarms(kind) <= LENGTH / BETWEEN + 0.08


def test_ranks_that_favour_small_values_would_be_found_out(monkeypatch):
    """The bug: ties are not broken at random."""
    monkeypatch.setattr(Random, "random", lambda _: 0.0)
    assert alarms(ChangeDetector(0, 1, 0.0), [0.5] * LENGTH, 1 / BETWEEN)


def test_expected_evidence_is_the_share_of_each_value(monkeypatch):
    for bet in change.BETS:
        assert quad(bet, 0, 1)[0] == pytest.approx(1, rel=1e-4)
    monkeypatch.setattr(change, "BETS", change.BETS[:2])  # the variance of the rest has no end
    random, total = Random(1), 0.0
    for seed in range(4000):
        detector = ChangeDetector(0, 1, 0.0, seed)
        assert not alarms(detector, values("two", random, 5), 1e-9)
        total += detector.evidence * 1e9
    assert total / 4000 == pytest.approx(5, rel=0.03)


@pytest.mark.parametrize("mean", [0.35, 0.75])
def test_a_change_is_found_soon(mean):
    """From a mean of 0.55 (standard deviation 0.05) after 300 values."""
    delays = []
    for seed in range(20):
        random = Random(seed)
        stream = [random.gauss(0.55, 0.05) for _ in range(300)]
        stream += [random.gauss(mean, 0.05) for _ in range(300)]
        (count, alarm), *_ = alarms(ChangeDetector(0, 1, 0.05, seed), stream, 1e-5)
        assert alarm.after == pytest.approx(mean, abs=0.1)
        assert alarm.before == pytest.approx(0.55, abs=0.05)
        delays.append(count - 300)
    assert min(delays) > 0
    assert sorted(delays)[10] < 30


def test_it_begins_anew_after_an_alarm():
    random = Random(3)
    stream = [random.gauss(level, 0.05) for level in (0.2, 0.8, 0.2) for _ in range(200)]
    assert len(alarms(ChangeDetector(0, 1, 0.1), stream, 1e-3)) == 2


@pytest.mark.parametrize("before", [12, 40])
def test_an_alarm_says_what_changed_however_few_values_came_before(before):
    for seed in range(3):
        stream = [0.1] * before + [0.9] * 100
        (count, alarm), *_ = alarms(ChangeDetector(0, 1, 0.05, seed), stream, 1e-3)
        assert before < count < 50 + before
        assert (alarm.before, alarm.after) == (pytest.approx(0.1), pytest.approx(0.9))


def test_changes_too_small_to_matter_raise_no_alarm_until_they_add_up():
    detector, random = ChangeDetector(0, 1, 0.05), Random(0)

    def at(mean):
        return alarms(detector, [random.gauss(mean, 0.04) for _ in range(1000)], 1e-4)

    assert at(0.55) == at(0.53) == at(0.55) == at(0.53) == []
    assert at(0.51) == []
    [(_, alarm)] = at(0.46)
    assert alarm.before - alarm.after >= 0.05
