"""The planner finds the tree that trying all of them finds."""

from functools import cache
from itertools import product

import numpy as np
import pytest

from research.plan_tree.tree_plan import PlannedTree, StaticTrees, expected_accepted, uniform_tree
from specdec_core.search.space import k_configurations

RATES = [
    [0.5, 0.2, 0.1, 0.05],
    [0.3, 0.25, 0.2, 0.15],
    [0.9, 0.02, 0.01],
    [0.2, 0.4, 0.1],  # the second most likely may be right more often
]


@cache
def forests(nodes, depth):
    """All ordered lists of trees with exactly `nodes` nodes and at most `depth` levels."""
    if nodes == 0:
        return ((),)
    if depth == 0:
        return ()
    return tuple(
        (first, *rest)
        for own in range(1, nodes + 1)
        for first in forests(own - 1, depth - 1)
        for rest in forests(nodes - own, depth)
    )


def value(acceptance, forest):
    rates = [*acceptance, *[0.0] * len(forest)]
    return sum(p * (1 + value(acceptance, own)) for p, own in zip(rates, forest, strict=False))


def branchings(nodes, depth, most):
    """All k-configurations within a budget."""
    for levels in range(1, depth + 1):
        for branching in product(range(1, most + 1), repeat=levels):
            if sum(np.cumprod(branching)) <= nodes:
                yield branching


@pytest.mark.parametrize("acceptance", RATES)
@pytest.mark.parametrize("depth", [1, 2, 3, 7])
def test_no_tree_is_better_than_the_planned_one(acceptance, depth):
    trees = StaticTrees(acceptance, 7, depth)
    for nodes in range(1, 8):
        best = max(
            value(acceptance, forest)
            for own in range(1, nodes + 1)
            for forest in forests(own, depth)
        )
        planned = trees.tree(nodes, depth)
        assert planned.expected == pytest.approx(best)
        assert trees.values[depth, nodes] == pytest.approx(best)
        assert planned.nodes <= nodes
        assert planned.depth <= depth


def test_a_k_configuration_is_the_tree_that_its_numbers_say():
    tree = uniform_tree([0.5, 0.2, 0.1, 0.05], (4, 2, 2, 1))
    assert tree.children == ((4,), (2,) * 4, (2,) * 8, (1,) * 16)
    assert (tree.nodes, tree.depth, tree.draft_tokens) == (44, 4, 29)
    assert tree.branching == (4, 2, 2, 1)
    assert tree.label == "4·2·2·1"
    assert tree.expected == pytest.approx(0.85 * (1 + 0.7 * (1 + 0.7 * (1 + 0.5))))


def test_the_grid_has_every_configuration_within_its_bounds_once():
    assert sorted(k_configurations(14, 4)) == sorted(branchings(14, 4, 14))
    assert sorted(k_configurations(20, 5, most=2)) == sorted(branchings(20, 5, 2))


@pytest.mark.parametrize("acceptance", [[], [0.8, 0.4], [0.5, -0.1], [[0.5]]])
def test_rates_that_are_none_are_refused(acceptance):
    with pytest.raises(ValueError, match="acceptance rates"):
        StaticTrees(acceptance, 4, 2)


def test_an_uneven_tree_has_no_branching():
    children = ((2,), (2, 0), (1, 1))
    tree = PlannedTree(children, expected_accepted([0.5, 0.2], children))
    assert tree.branching is None
    assert tree.label == "2|2|2"
    assert tree.expected == pytest.approx(0.7 + 0.5 * 0.7 + 0.5 * 0.7 * 0.5)
