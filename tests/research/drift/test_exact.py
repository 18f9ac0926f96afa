"""What target-initialised trees write, enumerated: the target's distribution for width 1."""

import numpy as np
import pytest

from research.drift.by_width import target_tree
from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.target_started.settings import TargetTreeSettings
from tests.research.drift.exact import exact_divergence, written_distribution
from tests.specdec_core.fits import goodness_of_fit
from tests.toy_pair import FAR, NEAR, exact_distribution, sample_counts, toy_pair

PLAIN = Sampling(temperature=1.0)
WARPED = {
    "plain": PLAIN,
    "top-k": Sampling(temperature=0.7, top_k=3),
    "top-p": Sampling(temperature=1.3, top_p=0.7),
}


def test_samples_fit_the_distribution_that_they_are_of_and_no_other_one():
    rng = np.random.default_rng(1)
    target = rng.dirichlet(np.full(400, 2.0))
    drifted = target * np.exp(0.4 * rng.standard_normal(400))
    fits = {}
    for name, own in (("target", target), ("drifted", drifted / drifted.sum())):
        draws = [np.random.default_rng(seed).multinomial(5_000, own) for seed in range(40)]
        fits[name] = [goodness_of_fit(counts, target) for counts in draws]
    assert sum(p_value < 0.05 for p_value in fits["target"]) <= 6
    assert max(fits["drifted"]) < 1e-3


def test_what_cannot_happen_must_not():
    assert goodness_of_fit(np.array([500, 499, 1]), np.array([0.5, 0.5, 0.0])) == 0.0


@pytest.fixture(scope="module")
def pair():
    return toy_pair()


def drift(pair, branching, sampling, **options):
    drafter = TargetTreeSettings(branching=branching, **options)
    written = written_distribution(pair, drafter, sampling, 3)
    assert written.sum() == pytest.approx(1)
    return exact_divergence(written, exact_distribution(pair, sampling, 3))


@pytest.mark.parametrize("branching", [(1, 1, 1), (1, 3, 2)])
@pytest.mark.parametrize("sampling", WARPED)
@pytest.mark.parametrize("replacement", [False, True])
def test_width_one_is_the_targets_distribution_by_enumeration(
    pair, branching, sampling, replacement
):
    options = {"draft": FAR, "replacement": replacement}
    kl, variation = drift(pair, branching, WARPED[sampling], **options)
    assert kl == pytest.approx(0, abs=1e-6)
    assert variation == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("sampling", "draft"), [("plain", NEAR), ("top-k", FAR), ("top-p", FAR)])
def test_it_drifts_further_with_every_token_to_begin_with(pair, draft, sampling):
    by_width = [drift(pair, (w, 2, 2), WARPED[sampling], draft=draft) for w in (1, 2, 3)]
    assert by_width[0][0] + 0.02 < by_width[1][0] < by_width[2][0]
    assert by_width[0][1] + 0.05 < by_width[1][1] < by_width[2][1]


def test_without_candidates_to_prefer_a_beginning_for_nothing_drifts(pair):
    assert drift(pair, (3,), PLAIN, draft=FAR) == pytest.approx((0, 0), abs=1e-6)


@pytest.mark.parametrize(
    ("branching", "sampling", "replacement"), [((4, 2, 1), "plain", True), ((3, 3), "top-k", False)]
)
def test_the_engine_writes_what_was_enumerated(pair, branching, sampling, replacement):
    drafter = TargetTreeSettings(draft=FAR, branching=branching, replacement=replacement)
    configuration = Configuration(drafter=drafter, sampling=WARPED[sampling])
    counts = sample_counts(pair, configuration, 3_000, 3)
    assert goodness_of_fit(counts, written_distribution(pair, drafter, WARPED[sampling], 3)) > 1e-3
    assert goodness_of_fit(counts, exact_distribution(pair, WARPED[sampling], 3)) < 1e-9


@pytest.mark.parametrize("sampling", ["plain", "top-k"])
def test_the_engine_keeps_the_targets_distribution_with_width_one_alone(pair, sampling):
    target, trees = exact_distribution(pair, WARPED[sampling], 3), {}
    for width in (1, 3):
        tree = target_tree(FAR, (width, 2, 2), WARPED[sampling])
        trees[width] = goodness_of_fit(sample_counts(pair, tree, 3_000, 3), target)
    assert trees[1] > 1e-3
    assert trees[3] < 1e-9


def test_what_is_not_enumerated_is_refused(pair):
    coupled = Sampling(temperature=1.0, coupling="gumbel")
    for sampling in (Sampling(), coupled):
        with pytest.raises(ValueError, match="only rejection sampling"):
            written_distribution(pair, TargetTreeSettings(draft=FAR), sampling, 2)


def test_divergence_of_known_distributions():
    target, written = np.array([0.5, 0.5, 0.0]), np.array([1.0, 0.0, 0.0])
    assert exact_divergence(written, target) == pytest.approx((np.log(2), 0.5))
