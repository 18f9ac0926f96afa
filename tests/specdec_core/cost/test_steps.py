"""The time of steps and forwards is fitted from measured forwards."""

import itertools
import random

import numpy as np
import pytest

from specdec_core.base.errors import UserError
from specdec_core.cost import ForwardCost, Measurement
from specdec_core.cost.fitting import nonnegative_least_squares
from specdec_core.cost.forward import FEW, ForwardTerms, Work
from specdec_core.cost.steps import StepTimes
from tests.specdec_core.cost.examples import constant_profile, measure, profile_of, truth

TRUE = ForwardTerms(
    fixed=8e-3,
    per_row=2e-4,
    per_token=5e-5,
    per_cached=2e-6,
    per_pair=3e-7,
    per_few_pair=5e-7,
    per_token_beyond=1e-4,
    knee=64,
)


def test_work_is_the_sum_over_rows():
    work = Work.of([(1, 100), (3, 10)])
    # The second row's tokens see 10, 11 and 12 before them.
    assert work == Work(rows=2, tokens=4, cached=110, pairs=100 + 33, few_pairs=133)
    assert TRUE.seconds(work) == pytest.approx(8e-3 + 2 * 2e-4 + 4 * 5e-5 + 110 * 2e-6 + 133 * 8e-7)
    chunk = Work.of([(1, 100), (FEW, 0)])
    assert (chunk.pairs, chunk.few_pairs) == (100 + FEW * (FEW - 1) / 2, 100)


def test_a_fit_finds_terms_and_knee_again():
    rng = random.Random(0)
    works = [
        Work.of((rng.randint(1, 40), rng.randint(0, 500)) for _ in range(rng.randint(1, 24)))
        for _ in range(80)
    ]
    fitted = ForwardTerms.fit(works, [TRUE.seconds(work) for work in works])
    assert fitted.knee == TRUE.knee
    assert fitted.model_dump() == pytest.approx(TRUE.model_dump(), rel=1e-4)


def test_no_term_is_negative_where_forwards_get_faster_with_more_work():
    works = [Work.of([(1, 0)] * n) for n in range(1, 9)]
    fitted = ForwardTerms.fit(works, [1 / (1 + work.rows) for work in works])
    assert min(fitted.model_dump().values()) >= 0
    with pytest.raises(ValueError, match="no measurements"):
        ForwardTerms.fit([], [])


def test_a_profile_tells_step_times():
    measurements = [
        Measurement(
            width=width,
            context=context,
            batch=batch,
            seconds=TRUE.seconds(Work.of([(width, context)] * batch)),
        )
        for width in (1, 3, 9)
        for context in (64, 256)
        for batch in (1, 4, 16)
    ]
    cost = ForwardCost.fit(measurements)
    beside = {"round_overhead": 1e-3, "draft_overhead": {"draft": 1e-2}, "row_overhead": 1e-4}
    profile = profile_of(cost, {"draft": cost}, **beside)
    times = StepTimes.of(profile)
    work, single = Work.of([(3, 100)] * 8), Work.of([(1, 100)] * 8)
    assert times.target.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.02)
    for terms, more in ((times.autoregressive, 0), (times.draft("draft"), 1e-2)):
        assert terms.seconds(single) == pytest.approx(TRUE.seconds(single) + more, rel=0.02)
    assert (times.per_step, times.per_row) == pytest.approx((9e-4, 1e-4))


@pytest.mark.parametrize("prompt", [1e-6, 2e-3, 5e-2])
def test_prompts_that_cost_a_draft_nothing_do_not_make_its_forwards_free(prompt):
    # As a server's profile has them: the difference of whole steps may be as little as nothing.
    measurements = [
        Measurement(width=1, context=context, batch=batch, seconds=5e-3 + 1e-3 * batch)
        for context in (64, 256)
        for batch in (1, 4, 8)
    ]
    cost = ForwardCost.fit(measurements).with_prefill({32: prompt, 128: prompt, 384: prompt})
    times = StepTimes.of(profile_of(cost, {"draft": cost})).draft("draft")
    for measured in measurements:
        taken = times.seconds(Work.of([(1, measured.context)] * measured.batch))
        assert taken == pytest.approx(measured.seconds, rel=0.2)


def test_constant_forward_times_do_not_depend_on_the_rows():
    times = StepTimes.of(constant_profile(0.2, 0.01, "small", autoregressive_forward=0.1))
    for rows in (1, 64):
        assert times.target.seconds(Work.of([(5, 300)] * rows)) == pytest.approx(0.2)
        assert times.draft("small").seconds(Work.of([(1, 300)] * rows)) == pytest.approx(0.01)
        work = Work.of([(1, 300)] * rows)
        assert times.autoregressive.seconds(work) == pytest.approx(0.1)


def test_a_draft_without_times_is_named():
    with pytest.raises(UserError, match=r"draft huge \(there are: none\)"):
        StepTimes(target=TRUE).draft("huge")


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

    def test_unset_context_is_the_median_one_measured_and_some_must_be(self):
        cost = ForwardCost.fit(measure((1, 2), (64, 256, 512), (1,)))
        assert cost.seconds(1) == cost.seconds(1, context=256)
        with pytest.raises(ValueError, match="no measurements"):
            ForwardCost.fit([])
