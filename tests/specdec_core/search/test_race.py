"""A race keeps its promises while it is looked at, and its choice costs little."""

import numpy as np
import pytest

from specdec_core.search import race as module
from specdec_core.search.race import Race

LAPS = 50


def lap(rng, race, prompt, means):
    """One prompt under everyone: prompts differ threefold, and each contestant by prompt."""
    size = rng.lognormal(0, 0.5)
    for name, mean in means.items():
        race.add(name, prompt, size * mean * rng.lognormal(-0.02, 0.2), 64)


def ever_wrong(seed):
    """Whether, at any lap, two equally fast contestants seem to be told apart."""
    rng = np.random.default_rng(seed)
    race = Race(["a", "b"])
    for prompt in range(LAPS):
        lap(rng, race, prompt, {"a": 1.0, "b": 1.0})
        ratio = race.ratio("a", "b")
        if ratio.low > 1 or ratio.high < 1:
            return True
    return False


def test_intervals_hold_at_every_lap_at_once():
    assert np.mean([ever_wrong(seed) for seed in range(100)]) <= 0.08


def test_intervals_for_one_look_would_not(monkeypatch):
    fixed = lambda prompts, alpha: np.inf if prompts < 6 else 1.96 / np.sqrt(prompts)  # noqa: E731
    monkeypatch.setattr(module, "width", fixed)
    assert np.mean([ever_wrong(seed) for seed in range(100)]) > 0.15


def test_a_few_prompts_show_nothing_and_many_tell_the_slow_from_the_fast():
    rng = np.random.default_rng(1)
    race = Race(["alone", "one", "two"])
    means = {"alone": 1.4, "one": 1.0, "two": 1.01}
    for prompt in range(4):
        lap(rng, race, prompt, means)
    standing = race.standing()
    assert standing.champion in ("one", "two")  # what is likely best, though nothing is shown
    assert standing.in_question == ("alone", "one", "two")
    assert standing.at_most == np.inf
    for prompt in range(4, 50):
        lap(rng, race, prompt, means)
    standing = race.standing()
    assert standing.in_question == ("one", "two")
    assert standing.champion in standing.in_question
    assert 0 < standing.loss < standing.at_most < 0.2


def test_a_slower_contestant_leaves_and_the_rest_are_compared_on_shared_prompts():
    rng = np.random.default_rng(2)
    race = Race(["fast", "near", "slow"])
    for prompt in range(30):
        question = race.in_question
        means = {"fast": 1.0, "near": 1.05, "slow": 2.0}
        lap(rng, race, prompt, {name: means[name] for name in question})
    assert race.in_question == ("fast", "near")
    assert race.ratio("fast", "slow").low > 1.2
    assert len(race._times["slow"]) < 30


def test_a_text_that_ends_at_once_is_not_charged_its_prompt_for_every_token():
    """Reading takes 1 s and a token 0.1; every tenth text of the second ends after its first."""
    race = Race(["a", "b"])
    for prompt in range(20):
        short = prompt % 10 == 0
        race.add("a", prompt, 6.0, 51, prefill=1.0)
        race.add("b", prompt, *((1.0, 1) if short else (6.0, 51)), prefill=1.0)
    assert race.ratio("b", "a").value == pytest.approx(1.0)


def test_only_what_was_timed_in_the_same_turn_is_compared():
    """The machine takes twice as long in the second turn."""
    race = Race(["a", "b"], newcomers=1)
    for prompt in range(30):
        for name, seconds in (("a", 1.5), ("b", 1.0)):
            race.add(name, prompt, seconds, 10, turn=0)
    race.enter(["c"])
    assert race.ratio("c", "a").high == np.inf
    for prompt in range(30):
        for name, seconds in (("b", 2.0), ("c", 1.8)):
            race.add(name, prompt, seconds, 10, turn=1)
    assert race.ratio("c", "b").value == pytest.approx(1 / 0.9)
    assert race.ratio("b", "a").value == pytest.approx(1.5)
    assert race.ratio("c", "a").high == np.inf  # never timed together
    assert race.standing().champion == "c"


def test_the_choice_costs_as_little_as_it_says():
    losses, said = [], []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        means = {"alone": 2.0, **{f"c{n}": 1 + 0.02 * n for n in range(5)}}
        race = Race(list(means))
        for prompt in range(30):
            lap(rng, race, prompt, {name: means[name] for name in race.in_question})
        standing = race.standing()
        losses.append(means[standing.champion] - 1)
        said.append(standing.loss)
        assert losses[-1] <= standing.at_most
    assert np.mean(losses) <= 2 * np.mean(said) + 0.005
