"""The race of a sweep's finalists: who goes on, when it ends, who wins."""

from collections import Counter

import numpy as np
import pytest

from cluster.sweep.racing import FinalistRace
from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE
from specdec_core.engine import Request
from specdec_core.search.plan import RaceSettings
from specdec_core.tokens.statistics import Generation
from tests.configurations import FOUR as FIXED
from tests.configurations import LOOKUP, SUFFIX
from tests.specdec_core.kinds import chain, configured

CONFIDENT = configured(chain("confidence"))


class NoisyTimer:
    """Prompts of other sizes, and 5 % noise; counts how often each was decoded. After the first
    pass the machine takes `drift` times as long."""

    drift = 1.0

    def __init__(self, means, prompts):
        self.rng = np.random.default_rng(0)
        self.sizes = self.rng.lognormal(0, 0.4, prompts)
        self.means, self.passes = means, 0
        self.decoded: Counter[tuple[str, int]] = Counter()

    def prepare(self, configurations, request):
        assert all(configuration in self.means for configuration in configurations)

    def forget(self):
        self.passes += 1

    def decode(self, configuration, request):
        self.decoded[configuration.id, request.seed] += 1
        noise = self.rng.normal(1, 0.05)
        if self.passes > 1:
            noise *= self.drift
        seconds = self.means[configuration] * self.sizes[request.seed] * noise
        return seconds, Generation(request.id, 5, [1] * 10, "", [], [], "length")


class Raced:
    """A race on 12 prompts and `further` ones; those `late` come in when they seem faster."""

    def __init__(self, means, late=(), further=0, repeats=3, **settings):
        self.timer = NoisyTimer(means, 12 + further)
        requests = [Request(str(n), (1,), 10, seed=n) for n in range(12 + further)]
        first = [configuration for configuration in means if configuration not in late]
        prompts = requests[:12], requests[12:]
        self.race = FinalistRace(first, *prompts, self.timer, RaceSettings(**settings))

        def challengers(taken):
            best = min(means[c] for c in means if c.id in taken)
            return [c for c in late if c.id not in taken and means[c] < best]

        self.summary = self.race.run(challengers, repeats, Observer())
        self.decoded = self.timer.decoded


def test_the_fastest_is_champion_and_only_those_in_question_are_decoded_again():
    means = {AUTOREGRESSIVE: 1.0, FIXED: 0.5, CONFIDENT: 0.505, LOOKUP: 0.8}
    raced = Raced(means, further=40)
    summary, decoded = raced.summary, raced.decoded
    assert summary.champion in (FIXED.id, CONFIDENT.id)
    assert set(summary.in_question) <= {FIXED.id, CONFIDENT.id}
    assert all(decoded[AUTOREGRESSIVE.id, seed] == 1 for seed in range(12))
    assert decoded[AUTOREGRESSIVE.id, 51] == 0
    assert decoded[summary.champion, 51] > 0
    timing = raced.race.timing(LOOKUP)
    assert timing.speedup == pytest.approx(1.25, rel=0.05)
    assert summary.loss < 0.02
    assert summary.prompts == 52


def test_a_race_ends_when_the_choice_is_good_enough_or_the_time_is_used():
    clear = {AUTOREGRESSIVE: 1.0, FIXED: 0.5}
    assert Raced(clear, further=40).summary.laps < 20
    close = {AUTOREGRESSIVE: 1.0, FIXED: 0.5, CONFIDENT: 0.5}
    assert Raced(close, repeats=9).summary.laps == 9 * 12
    assert Raced(close, repeats=9, seconds=0).summary.laps == 12
    assert Raced(close, repeats=9, within=0.5).summary.laps < 40


def test_who_seems_faster_after_the_first_times_is_timed_against_the_champion():
    means = {AUTOREGRESSIVE: 1.0, FIXED: 0.7, LOOKUP: 0.8, CONFIDENT: 0.6, SUFFIX: 0.9}
    raced = Raced(means, late=(CONFIDENT, SUFFIX))
    assert raced.summary.champion == CONFIDENT.id
    assert raced.race.contestants[-1] == CONFIDENT
    assert all(raced.decoded[FIXED.id, seed] >= 2 for seed in range(12))  # in the same turns
    assert raced.decoded[LOOKUP.id, 11] == 1
    assert raced.decoded[SUFFIX.id, 0] == 0


def test_a_machine_that_got_slower_makes_no_latecomer_look_slower(monkeypatch):
    monkeypatch.setattr(NoisyTimer, "drift", 1.5)
    means = {AUTOREGRESSIVE: 1.0, FIXED: 0.7, LOOKUP: 0.8, CONFIDENT: 0.6}
    raced = Raced(means, late=(CONFIDENT,))
    assert raced.summary.champion == CONFIDENT.id
    late, fixed, lookup = map(raced.race.timing, (CONFIDENT, FIXED, LOOKUP))
    assert late.speedup == pytest.approx(1 / 0.6, rel=0.05)
    assert late.over(fixed).value == pytest.approx(0.7 / 0.6, rel=0.05)
    # The lookup had left the race: by what both are over autoregressive decoding.
    assert not set(late.passes) & set(lookup.passes)
    over = late.over(lookup)
    assert over.value == pytest.approx(0.8 / 0.6, rel=0.07)
    assert over.low < over.value < over.high


@pytest.mark.parametrize("settings", [{"challengers": 0}, {"seconds": 0}])
def test_nobody_comes_in_without_a_place_or_time(settings):
    means = {AUTOREGRESSIVE: 1.0, FIXED: 0.7, CONFIDENT: 0.6}
    assert Raced(means, late=(CONFIDENT,), **settings).summary.champion == FIXED.id


def test_nobody_comes_in_whose_pass_would_take_longer_than_is_left():
    means = {AUTOREGRESSIVE: 1.0, FIXED: 0.7, LOOKUP: 0.7, CONFIDENT: 0.6}
    raced = Raced(means, late=(CONFIDENT,))
    first = 12 * (1.0 + 0.7 + 0.7)
    assert raced.decoded[CONFIDENT.id, 0] > 0
    raced = Raced(means, late=(CONFIDENT,), seconds=first)
    assert raced.decoded[CONFIDENT.id, 0] == 0
    assert raced.summary.laps > 12  # those in question go on


def test_drafters_forget_before_every_pass():
    close = {AUTOREGRESSIVE: 1.0, FIXED: 0.5, CONFIDENT: 0.5}
    assert Raced(close, further=3, repeats=2).timer.passes == 4


def test_autoregressive_decoding_is_champion_where_nothing_is_faster():
    summary = Raced({AUTOREGRESSIVE: 1.0, FIXED: 1.5}).summary
    assert summary.champion == AUTOREGRESSIVE.id
    assert summary.at_most == 0
