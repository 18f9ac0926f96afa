"""Estimates learn from what was timed, and never from a configuration's own time."""

import pytest

from specdec_core.config import AUTOREGRESSIVE
from specdec_core.cost import ForwardCost, Profile
from specdec_core.search.estimates import correct, corrected
from specdec_core.search.results import METRIC, SECONDS, Trial
from specdec_core.tokens.statistics import Counts
from tests.specdec_core.kinds import chain, configured

PROFILE = Profile(
    # A first round's forward prefills the prompt: 0.1 and 0.2 s more than the 10 ms of another.
    target=ForwardCost.constant(10e-3).with_prefill({64: 0.11, 128: 0.21}),
    drafts={"draft": ForwardCost.constant(1e-3).with_prefill({64: 0.01, 128: 0.02})},
    device="cpu",
    target_dtype="float32",
    draft_dtype="float32",
)
PROMPTS = (64, 128)
FIXED = [configured(chain(max_tokens=k)) for k in (2, 4)]
CONFIDENT = configured(chain("confidence"))
LOOKUPS = [configured({"kind": "prompt_lookup", "max_tokens": k}) for k in (4, 8, 12)]
SUFFIX = configured({"kind": "suffix"})


def trial(configuration, rounds, drafts=0):
    """100 tokens in `rounds` rounds."""
    kept = 100 - rounds
    counts = Counts(
        2, 100, drafts, rounds, 0, n_drafted=kept, n_accepted=kept, n_target_tokens=rounds
    )
    return Trial.of(configuration, counts, PROFILE, 64, PROMPTS)


def test_an_estimate_includes_what_reading_the_prompts_takes():
    alone, lookup, drafted = (
        trial(AUTOREGRESSIVE, 100),
        trial(LOOKUPS[0], 40),
        trial(FIXED[0], 40, 80),
    )
    assert alone.metrics[SECONDS] == pytest.approx(100 * 10e-3 + 0.3)
    assert lookup.metrics[SECONDS] == pytest.approx(40 * 10e-3 + 0.3)
    assert drafted.metrics[SECONDS] == pytest.approx(40 * 10e-3 + 80 * 1e-3 + 0.33)
    assert lookup.metrics[METRIC] == pytest.approx(1.3 / 0.7)


def test_what_a_family_takes_beyond_its_forwards_is_expected_of_its_others():
    trials = [
        trial(AUTOREGRESSIVE, 100),
        trial(LOOKUPS[0], 40),
        trial(LOOKUPS[1], 30),
        trial(SUFFIX, 30),
    ]
    # The machine is 10 % slower than when it was profiled; a lookup adds 2 ms to a round.
    taken = {
        AUTOREGRESSIVE.id: 1.1 * 1.3,
        LOOKUPS[0].id: 1.1 * 0.7 + 40 * 2e-3,
        SUFFIX.id: 1.1 * 0.6 + 30 * 5e-3,
    }
    expected = corrected(trials, taken)
    assert expected[LOOKUPS[1].id] == pytest.approx(1.1 * 0.6 + 30 * 2e-3)
    correct(trials, taken)
    assert trials[2].metrics[SECONDS] == pytest.approx(expected[LOOKUPS[1].id])
    assert trials[2].metrics[METRIC] == pytest.approx(
        taken[AUTOREGRESSIVE.id] / expected[LOOKUPS[1].id]
    )


def test_a_configurations_own_time_does_not_enter_its_estimate():
    trials = [trial(AUTOREGRESSIVE, 100), trial(FIXED[0], 40, 80), trial(FIXED[1], 30, 120)]
    taken = {AUTOREGRESSIVE.id: 1.3, FIXED[0].id: 0.9, FIXED[1].id: 0.8}
    before = corrected(trials, taken)
    after = corrected(trials, {**taken, FIXED[0].id: 9.0})
    assert after[FIXED[0].id] == before[FIXED[0].id]
    assert after[FIXED[1].id] > before[FIXED[1].id]


def test_a_family_of_which_none_was_timed_takes_after_all_others():
    trials = [
        trial(AUTOREGRESSIVE, 100),
        trial(LOOKUPS[0], 40),
        trial(SUFFIX, 50),
        trial(CONFIDENT, 40, 60),
    ]
    taken = {AUTOREGRESSIVE.id: 1.3, LOOKUPS[0].id: 0.7 + 40 * 1e-3, SUFFIX.id: 0.8 + 50 * 3e-3}
    forwards = trials[3].metrics[SECONDS]
    assert corrected(trials, taken)[CONFIDENT.id] == pytest.approx(forwards + 40 * 2e-3)


def test_nothing_is_corrected_without_the_time_of_autoregressive_decoding():
    trials = [trial(AUTOREGRESSIVE, 100), trial(LOOKUPS[0], 40)]
    assert corrected(trials, {LOOKUPS[0].id: 2.0}) == {}
    before = trials[1].metrics[METRIC]
    correct(trials, {LOOKUPS[0].id: 2.0})
    assert trials[1].metrics[METRIC] == before
