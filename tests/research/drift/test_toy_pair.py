"""On a toy pair with a known distribution, trees that the target begins drift with their width."""

import pytest

from research.drift.by_width import target_tree
from research.drift.drift import goodness_of_fit
from research.drift.toy_pair import FAR, exact_distribution, sample_counts, toy_pair
from specdec_core.config import Sampling

SAMPLINGS = [Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=3)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "top-k"])
def test_width_one_is_the_targets_distribution_and_wider_trees_are_not(sampling):
    pair = toy_pair()
    target = exact_distribution(pair, sampling, 3)
    found = {
        width: goodness_of_fit(
            sample_counts(pair, target_tree(FAR, (width, 2, 2), sampling), 3_000, 3), target
        )
        for width in (1, 3)
    }
    assert found[1] > 1e-3
    assert found[3] < 1e-9
