import numpy as np
import pytest

from specdec_core.tokens.statistics import (
    Counts,
    Generation,
    Ratio,
    Round,
    TokenOrigin,
    paired_ratio,
    rounds_frame,
)

D, C, B = TokenOrigin.DRAFT, TokenOrigin.CORRECTION, TokenOrigin.BONUS


def round_of(position, drafted, accepted, generated):
    return Round(position, drafted, accepted, generated, drafted, 0.0, 0.0, 0.0)


def generation(request_id="a"):
    """Three rounds: all of 3 accepted, 1 of 3 accepted, and an end token as the last accepted."""
    return Generation(
        request_id=request_id,
        prompt_tokens=5,
        tokens=[1, 2, 3, 4, 5, 6, 7, 8],
        text="",
        origins=[D, D, D, B, D, C, D, D],
        rounds=[round_of(0, 3, 3, 4), round_of(4, 3, 1, 2), round_of(6, 4, 2, 2)],
        finish_reason="stop",
    )


class TestCounts:
    def test_forwards_and_tokens_are_summed_over_rounds_and_requests(self):
        assert Counts.of([generation("a"), generation("b")]) == Counts(
            requests=2,
            n=16,
            n_draft=20,
            n_target=6,
            n_discarded=8,
            n_drafted=20,
            n_accepted=12,
            n_target_tokens=4,
        )
        assert generation().counts == Counts.of([generation()])

    def test_metrics_are_the_papers_rates(self):
        assert generation().counts.metrics() == pytest.approx(
            {
                "discard_rate": 4 / 8,
                "verification_rate": 3 / 8,
                "mat": 8 / 3,
                "acceptance_rate": 6 / 10,
                "utilisation": 8 / 10,
            }
        )
        assert all(np.isfinite(value) for value in Counts.of([]).metrics().values())


def test_rounds_frame_has_one_row_a_round_and_the_given_columns():
    frame = rounds_frame([generation("a"), generation("b")], config="x")
    assert list(frame["request_id"]) == ["a"] * 3 + ["b"] * 3
    assert list(frame["round"]) == [0, 1, 2] * 2
    assert set(frame["config"]) == {"x"}
    assert frame["accepted"].sum() == 12


class TestPairedRatio:
    def test_value_is_the_ratio_of_summed_medians(self):
        baseline = np.array([[2.0, 4.0], [2.2, 4.2], [9.0, 4.1]])
        candidate = np.array([[1.0, 2.0], [1.1, 2.1], [1.2, 8.0]])
        assert paired_ratio(baseline, candidate).value == pytest.approx((2.2 + 4.1) / (1.1 + 2.1))

    def test_interval_covers_the_true_ratio_about_as_often_as_it_says(self):
        rng = np.random.default_rng(0)
        truth, covered, trials = 1.5, 0, 150
        for _ in range(trials):
            prompts = rng.lognormal(0, 0.5, size=16)
            own = truth * rng.lognormal(0, 0.15, size=16)  # the speedup differs by prompt
            candidate = prompts * rng.lognormal(0, 0.03, size=(3, 16))
            baseline = own * prompts * rng.lognormal(0, 0.03, size=(3, 16))
            ratio = paired_ratio(baseline, candidate, draws=300)
            covered += ratio.low <= truth * np.exp(0.15**2 / 2) <= ratio.high
        assert 0.85 <= covered / trials <= 0.995

    def test_pairing_cancels_what_prompts_and_the_machine_have_in_common(self):
        rng = np.random.default_rng(0)
        difficulty = rng.lognormal(0, 2, size=(1, 12))  # prompts from easy to a hundredfold
        load = rng.uniform(1, 3, size=(5, 12))  # what slowed both runs of a repeat
        common = difficulty * load
        paired = paired_ratio(1.2 * common, common)
        assert (paired.low, paired.high) == pytest.approx((1.2, 1.2))
        shuffled = paired_ratio(1.2 * common, rng.permuted(common, axis=1))
        assert shuffled.high - shuffled.low > 0.5

    def test_equal_configurations_are_tied_and_a_clear_winner_is_not(self):
        rng = np.random.default_rng(0)
        base = rng.lognormal(0, 0.3, size=12)
        runs = [base * rng.lognormal(0, 0.05, size=(5, 12)) for _ in range(2)]
        assert paired_ratio(*runs).tied
        assert not paired_ratio(1.3 * runs[0], runs[1]).tied
        assert Ratio(1.1, 1.0, 1.2).tied

    def test_unpaired_times_are_refused(self):
        with pytest.raises(ValueError, match="unpaired times"):
            paired_ratio(np.ones((2, 3)), np.ones((2, 4)))
