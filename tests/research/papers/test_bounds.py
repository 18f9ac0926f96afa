"""SVIP's bounds lie below the acceptance rate, and the fit of γ finds the truth."""

import numpy as np
import pytest
from scipy import stats

from research.papers.bounds import (
    RatioFit,
    approximation_bound,
    bretagnolle_huber_bound,
    entropy_ratio,
    oracle_bound,
)

ONE_HOT, OTHER = np.eye(8)[0], np.eye(8)[1]
UNIFORM = np.full(8, 1 / 8)
NEARLY = (1 - 1e-9) * ONE_HOT + 1e-9 * UNIFORM
HALF = np.repeat([0.25, 0.0], 4)


def expected_acceptance(p, q):
    """Eq. 1: β = Σ min(p, q), the chance that a token drawn from q is accepted, over the last
    axis."""
    return np.minimum(p, q).sum(axis=-1)


def entropy(q):
    """H_q over the last axis."""
    return cross_entropy(q, q)


def cross_entropy(q, p):
    """H_{q,p} over the last axis; infinite where q has a token that p lacks."""
    q, p = np.broadcast_arrays(np.asarray(q, dtype=float), np.asarray(p, dtype=float))
    with np.errstate(divide="ignore"):
        log_p = np.log(p)
    return -np.multiply(q, log_p, out=np.zeros_like(q), where=q > 0).sum(axis=-1)


def random_pairs():
    """(p, q) from equal to unrelated, from flat to almost certain."""
    rng = np.random.default_rng(0)
    pairs = []
    for concentration in (0.01, 0.1, 1.0, 30.0):
        for likeness in (0.0, 0.5, 0.99, 1 - 1e-7):
            p, other = rng.dirichlet(np.full(50, concentration), size=(2, 40))
            pairs.append((p, likeness * p + (1 - likeness) * other))
    return pairs


EXTREMES = [
    (p, q)
    for p in (ONE_HOT, OTHER, UNIFORM, NEARLY, HALF)
    for q in (ONE_HOT, OTHER, UNIFORM, NEARLY, HALF)
]


class TestBounds:
    @pytest.mark.parametrize("bound", [oracle_bound, bretagnolle_huber_bound])
    @pytest.mark.parametrize("pairs", [random_pairs(), EXTREMES], ids=["random", "extreme"])
    def test_lie_below_the_acceptance_rate(self, bound, pairs):
        for p, q in pairs:
            beta = expected_acceptance(p, q)
            below = bound(entropy(q), cross_entropy(q, p))
            assert not np.isnan(below).any()
            assert (below <= beta + 1e-7).all()

    def test_are_reached_by_equal_distributions(self):
        for p, _ in EXTREMES:
            h = entropy(p)
            assert oracle_bound(h, h) == bretagnolle_huber_bound(h, h) == 1
            assert expected_acceptance(p, p) == pytest.approx(1)

    def test_bretagnolle_huber_is_never_empty_and_pinsker_is_tighter_near_agreement(self):
        divergence = np.array([0.01, 0.5, 1.5, 2.5, 20.0, np.inf])
        pinsker = oracle_bound(0, divergence)
        other = bretagnolle_huber_bound(0, divergence)
        assert (other >= 0).all()
        np.testing.assert_array_equal(pinsker > other, [True, True, True, False, False, False])

    def test_entropies_are_scipys(self):
        for p, q in [*random_pairs(), *EXTREMES]:
            np.testing.assert_allclose(entropy(q), stats.entropy(q, axis=-1), atol=1e-12)
            difference = cross_entropy(q, p) - entropy(q)
            np.testing.assert_allclose(difference, stats.entropy(q, p, axis=-1), atol=1e-9)


class TestApproximation:
    def test_is_below_the_oracle_bound_just_where_the_ratio_is_small_enough(self):
        c = 0.2
        p, q = np.concatenate(random_pairs(), axis=1)
        h, cross = entropy(q), cross_entropy(q, p)
        small = entropy_ratio(h, cross) <= 2 * c + 1
        assert 0 < small.mean() < 1
        np.testing.assert_array_equal(
            approximation_bound(h, c) <= oracle_bound(h, cross) + 1e-12, small
        )

    def test_a_certain_draft_has_no_ratio(self):
        assert np.isnan(entropy_ratio(0.0, 0.0))
        assert np.isnan(entropy_ratio(0.0, 2.0))
        assert entropy_ratio(0.5, np.inf) == np.inf


class TestRatioFit:
    def test_finds_the_gaussian_that_positions_were_drawn_from(self):
        rng = np.random.default_rng(0)
        h = rng.exponential(2.0, size=20_000)
        ratio = rng.normal(9.0, 1.5, size=len(h))
        fit = RatioFit.gaussian(h, ratio * h)
        assert fit.parameters == pytest.approx((9.0, 1.5), rel=0.02)
        assert fit.reliability(4.0) == pytest.approx(0.5, abs=0.02)  # Eq. 14 at 2c + 1 = μ
        assert fit.reliability(4.75) == pytest.approx(0.841, abs=0.02)  # one σ above

    @pytest.mark.parametrize(("shape", "rate"), [(0.4, 1.5), (1.0, 0.3), (5.0, 8.0)])
    def test_finds_the_gamma_that_positions_were_drawn_from(self, shape, rate):
        rng = np.random.default_rng(0)
        h = rng.exponential(2.0, size=20_000)
        ratio = 1 + rng.gamma(shape, 1 / rate, size=len(h))
        fit = RatioFit.gamma(h, ratio * h)
        assert fit.parameters == pytest.approx((shape, rate), rel=0.05)
        for c in (0.1, 0.5, 2.0):
            assert fit.reliability(c) == pytest.approx(np.mean(ratio <= 2 * c + 1), abs=0.02)

    def test_positions_that_have_no_ratio_are_left_out(self):
        assert RatioFit.gaussian([1.0, 1.0, 0.0, 1.0], [2.0, 3.0, 1.0, np.inf]).parameters[0] == 2.5
        h, excess = np.array([1.0, 2.0, 0.5, 1.0]), np.array([0.2, 0.4, 0.1, 0.9])
        clean = RatioFit.gamma(h, (1 + excess) * h)
        # Certain draft, equal distributions, a rounding error below equality, an excluded token.
        odd_h, odd_cross = [0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1 - 1e-9, np.inf]
        mixed = RatioFit.gamma(np.append(h, odd_h), np.append((1 + excess) * h, odd_cross))
        assert mixed.parameters == clean.parameters

    @pytest.mark.parametrize("cross", [[1.0, 1.0], [2.0, 2.0], [np.inf, 2.0], []])
    def test_too_few_positions_are_refused(self, cross):
        for fit in (RatioFit.gamma, RatioFit.gaussian):
            with pytest.raises(ValueError, match="too few positions"):
                fit(np.ones(len(cross)), cross)
