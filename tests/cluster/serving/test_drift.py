"""Steady traffic raises no alarm, and traffic that changed raises one that says how."""

from collections.abc import Iterator
from heapq import heappop, heappush
from math import log2
from random import Random

import pytest

from cluster.serving.drift import WEEK, Drift

Traffic = Iterator[tuple[float, float, float]]  # seconds, log₂ of prompt tokens, acceptance


def alone(random, rate):
    """`rate` requests a second. Seven in ten are questions, the rest bring documents along."""
    now = 0.0
    while True:
        now += random.expovariate(rate)
        centre, spread = (4.5, 0.6) if random.random() < 0.7 else (8, 0.4)
        yield now, log2(random.lognormvariate(centre, spread) + 1), random.betavariate(5, 3)


def conversations(random, rate):
    """The same rate, by users who ask one to eight times, a minute apart, with prompts that grow
    and texts that are easy or hard to draft."""
    began, number = random.expovariate(rate / 4.5), 0
    waiting: list[tuple[float, int, float, float, int]] = []
    while True:
        while not waiting or began < waiting[0][0]:
            level = random.betavariate(5, 3)
            first = random.lognormvariate(5, 1)
            heappush(waiting, (began, number, first, level, random.randint(1, 8)))
            began, number = began + random.expovariate(rate / 4.5), number + 1
        now, user, tokens, level, left = heappop(waiting)
        yield now, log2(tokens + 1), min(max(random.gauss(level, 0.1), 0), 1)
        if left > 1:
            longer = tokens + random.lognormvariate(5, 0.5)
            heappush(waiting, (now + random.expovariate(1 / 60), user, longer, level, left - 1))


def watched(traffic, seconds):
    """What the first `seconds` of this traffic left behind."""
    clock = [0.0]
    drift = Drift(lambda: clock[0])
    for now, length, acceptance in traffic:
        if now > seconds:
            break
        clock[0] = now
        drift._add("acceptance", acceptance)
        drift._add("prompt_tokens", length)
    return drift


def changed(at, prompt, acceptance, seed):
    """A request each three seconds; from then on prompts and acceptance are so much greater."""
    random, now = Random(seed), 0.0
    while True:
        now += random.expovariate(0.3)
        more = now > at
        yield now, random.gauss(8, 1.5) + more * prompt, random.gauss(0.6, 0.15) + more * acceptance


def test_a_day_of_conversations_raises_no_alarm_and_each_change_that_matters_one():
    assert not watched(conversations(Random(1), 0.1), WEEK / 7).alarms
    [longer] = watched(changed(WEEK / 14, 1.0, 0.0, seed=2), WEEK / 9).alarms
    assert longer.signal == "prompt_tokens"
    assert longer.before == pytest.approx(256, rel=0.05)
    assert longer.after == pytest.approx(512, rel=0.2)
    [harder] = watched(changed(WEEK / 14, 0.0, -0.1, seed=3), WEEK / 9).alarms
    assert harder.signal == "acceptance"
    assert harder.before == pytest.approx(0.6, abs=0.01)
    assert harder.after == pytest.approx(0.5, abs=0.04)


def test_a_difference_that_changes_no_choice_raises_no_alarm():
    """It is far more than chance explains, and no finalist would change places for it."""
    assert not watched(changed(WEEK / 14, log2(1.1), -0.02, seed=4), WEEK / 4).alarms


@pytest.mark.long
@pytest.mark.parametrize("rate", [0.003, 0.02, 0.1])
@pytest.mark.parametrize("traffic", [alone, conversations])
def test_steady_traffic_raises_at_most_one_false_alarm_in_a_week(traffic, rate):
    weeks = 10 if rate == 0.1 else 40
    raised = watched(traffic(Random(5), rate), weeks * WEEK).counts
    print(f"{traffic.__name__}, {rate} requests/s, {weeks} weeks: {raised}")
    assert sum(raised.values()) <= weeks
