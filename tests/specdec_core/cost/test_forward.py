"""Forward costs: fits find the truth and never promise that more work is faster."""

import itertools

import numpy as np
import pytest

from specdec_core.cost import ForwardCost, Measurement
from specdec_core.cost.fitting import nonnegative_least_squares
from tests.specdec_core.cost.examples import measure, truth


class TestLeastSquares:
    def test_exact_solution_is_found_whatever_the_columns_scales(self):
        rng = np.random.default_rng(0)
        columns = rng.uniform(size=(20, 4)) * [1, 1e3, 1e6, 1e-4]
        truth = np.array([2.0, 3e-3, 0.0, 5e3])
        np.testing.assert_allclose(
            nonnegative_least_squares(columns, columns @ truth), truth, rtol=1e-6, atol=1e-9
        )

    def test_columns_that_cannot_be_told_apart_keep_the_first(self):
        columns = np.ones((5, 2))
        assert nonnegative_least_squares(columns, np.full(5, 3.0)) == pytest.approx([3.0, 0.0])


class TestForwardCost:
    def test_fit_recovers_the_cost_of_every_kind_of_forward(self):
        cost = ForwardCost.fit(measure((1, 2, 5, 16), (64, 256, 512), (1, 2, 4)))
        assert cost.r2 == pytest.approx(1)
        assert cost.worst_error < 1e-6
        for w, c, b in [(1, 1000, 1), (1, 300, 8), (9, 128, 2), (40, 2000, 16)]:
            assert cost.seconds(w, c, b) == pytest.approx(truth(w, c, b))

    def test_noise_lowers_r2_and_shows_in_the_worst_error(self):
        rng = np.random.default_rng(0)
        noisy = [
            m.model_copy(update={"seconds": m.seconds * rng.uniform(0.8, 1.25)})
            for m in measure((1, 2, 5, 16), (64, 256, 512), (1, 4))
        ]
        cost = ForwardCost.fit(noisy)
        assert 0.5 < cost.r2 < 0.999
        assert 0.02 < cost.worst_error < 0.5

    def test_more_work_is_never_predicted_faster_within_a_kind(self):
        # Time falls with width here, as noise or odd kernels can make it.
        falling = [
            Measurement(width=w, context=c, batch=1, seconds=1e-2 / w)
            for w in (2, 4, 8)
            for c in (64, 512)
        ]
        cost = ForwardCost.fit(falling)
        assert cost.seconds(64, 512) >= cost.seconds(2, 64) > 0

    @pytest.mark.parametrize(
        ("widths", "batches"), [((1,), (1,)), ((1,), (4,)), ((2, 8), (1,)), ((1, 4), (1,))]
    )
    def test_kinds_that_were_not_measured_are_stood_in_for(self, widths, batches):
        cost = ForwardCost.fit(measure(widths, (64, 256), batches))
        for width, batch in itertools.product((1, 1.5, 2, 7), (1, 3)):
            assert cost.seconds(width, 128, batch) > 0

    def test_mean_width_gives_the_mean_time(self):
        cost = ForwardCost.fit(measure((1, 2, 5, 16), (64, 256), (1,)))
        widths = [2, 3, 9, 14]
        mean = np.mean([cost.seconds(w, 100) for w in widths])
        assert cost.seconds(np.mean(widths), 100) == pytest.approx(mean)
        # Rounds of one and two tokens: three of four were of one.
        mixed = np.mean([cost.seconds(w, 100) for w in (1, 1, 1, 2)])
        assert cost.seconds(1.25, 100) == pytest.approx(mixed)

    def test_in_steps_each_number_of_tokens_takes_what_it_took(self):
        """Kernels take tokens in blocks, here of four."""
        taken = [
            Measurement(width=w, context=c, batch=b, seconds=-(-w * b // 4) + c * b * 1e-4)
            for w, c, b in itertools.product((2, 3, 4, 5, 8, 9), (64, 256), (1, 2))
        ]
        line = ForwardCost.fit(taken)
        cost = line.in_steps()
        for m in taken:
            assert cost.seconds(m.width, m.context, m.batch) == pytest.approx(m.seconds, rel=0.02)
        assert line.worst_error > 0.2
        assert line.r2 < 0.99 < cost.r2
        between = cost.seconds(4, 64) + cost.seconds(8, 64)
        assert cost.seconds(4, 64) < cost.seconds(6, 64) < between
        assert ForwardCost.model_validate_json(cost.model_dump_json()) == cost

    def test_unset_context_is_the_median_one_measured(self):
        cost = ForwardCost.fit(measure((1, 2), (64, 256, 512), (1,)))
        assert cost.seconds(1) == cost.seconds(1, context=256)

    def test_no_measurements_are_refused(self):
        with pytest.raises(ValueError, match="no measurements"):
            ForwardCost.fit([])
