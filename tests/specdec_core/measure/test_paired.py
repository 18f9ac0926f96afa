"""Contestants are compared on paired requests, which are resampled together."""

import math

import numpy as np
import pytest

from specdec_core.measure.paired import paired_ratio
from specdec_core.tokens.statistics import Ratio


def test_the_value_is_the_ratio_of_summed_medians():
    baseline = np.array([[2.0, 4.0], [2.2, 4.2], [9.0, 4.1]])
    candidate = np.array([[1.0, 2.0], [1.1, 2.1], [1.2, 8.0]])
    assert paired_ratio(baseline, candidate).value == pytest.approx((2.2 + 4.1) / (1.1 + 2.1))


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    truth, covered, trials = 1.5, 0, 150
    for _ in range(trials):
        prompts = rng.lognormal(0, 0.5, size=16)
        own = truth * rng.lognormal(0, 0.15, size=16)  # the speedup differs by prompt
        candidate = prompts * rng.lognormal(0, 0.03, size=(3, 16))
        baseline = own * prompts * rng.lognormal(0, 0.03, size=(3, 16))
        ratio = paired_ratio(baseline, candidate)
        covered += ratio.low <= truth * np.exp(0.15**2 / 2) <= ratio.high
    assert 0.85 <= covered / trials <= 0.995


def test_pairing_cancels_what_prompts_and_the_machine_have_in_common():
    rng = np.random.default_rng(0)
    difficulty = rng.lognormal(0, 2, size=(1, 12))  # prompts from easy to a hundredfold
    load = rng.uniform(1, 3, size=(5, 12))  # what slowed both runs of a repeat
    common = difficulty * load
    paired = paired_ratio(1.2 * common, common)
    assert (paired.low, paired.high) == pytest.approx((1.2, 1.2))
    shuffled = paired_ratio(1.2 * common, rng.permuted(common, axis=1))
    assert shuffled.high - shuffled.low > 0.5


def test_equal_configurations_are_tied_and_a_clear_winner_is_not():
    rng = np.random.default_rng(0)
    base = rng.lognormal(0, 0.3, size=12)
    runs = [base * rng.lognormal(0, 0.05, size=(5, 12)) for _ in range(2)]
    assert paired_ratio(*runs).tied
    assert not paired_ratio(1.3 * runs[0], runs[1]).tied
    assert Ratio(1.1, 1.0, 1.2).tied


def test_unpaired_times_are_refused():
    with pytest.raises(ValueError, match="unpaired requests"):
        paired_ratio(np.ones((2, 3)), np.ones((2, 4)))


def test_requests_that_failed_count_for_none_and_turns_that_one_missed_for_neither():
    baseline = np.array([[2.0, 4.0, 9.0], [2.0, 4.0, 9.0]])
    candidate = np.array([[1.0, 2.0, np.nan]])
    ratio = paired_ratio(baseline, candidate)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2, 2, 2))
    assert math.isnan(paired_ratio(baseline, np.full((1, 3), np.nan)).low)
