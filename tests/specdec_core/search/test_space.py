"""A search list becomes the configurations it describes, and a bad one is one clear line."""

import math

import numpy as np
import optuna
import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.search.space import Search

FIXED = {"drafter": {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": 4}}}


def lookup(**values):
    return {"drafter": {"kind": "prompt_lookup", **values}}


def test_a_grid_is_the_product_of_the_lists_of_each_entry_in_file_order():
    search = Search.of([lookup(max_ngram=[2, 3], max_tokens=[5, 10]), FIXED], "sweep.yaml")
    drafters = [c.drafter for c in search.grid()]
    assert [(d.max_ngram, d.max_tokens) for d in drafters[:4]] == [(2, 5), (2, 10), (3, 5), (3, 10)]
    assert drafters[4:] == [Configuration.model_validate(FIXED).drafter]


def test_a_configuration_that_two_entries_describe_is_tried_once():
    search = Search.of([lookup(max_tokens=[5, 10]), lookup(max_tokens=[10, 20])], "s")
    assert [c.drafter.max_tokens for c in search.grid()] == [5, 10, 20]


RANGES = [
    lookup(max_ngram={"randint": [2, 3]}, max_tokens={"randint": [1, 20]}),
    {
        "drafter": {
            "kind": "draft_model",
            "policy": {"kind": "svip", "threshold": {"loguniform": [0.1, 3]}},
        }
    },
]


def test_random_draws_are_distinct_inside_their_ranges_and_the_same_for_the_same_seed():
    search = Search.of(RANGES, "s")
    drawn = search.draw(40, seed=1)
    assert drawn == search.draw(40, seed=1) != search.draw(40, seed=2)
    assert len({c.id for c in drawn}) == 40
    lookups = [c.drafter for c in drawn if c.family == "prompt_lookup"]
    assert {d.max_ngram for d in lookups} == {2, 3}
    assert all(1 <= d.max_tokens <= 20 for d in lookups)
    svips = [c.drafter.policy.threshold for c in drawn if c.family == "svip"]
    assert svips
    assert all(0.1 <= threshold <= 3 for threshold in svips)


def test_random_draws_end_when_everything_has_been_drawn():
    assert len(Search.of([lookup(max_ngram=[1, 2, 3])], "s").draw(50, seed=0)) == 3


def test_optuna_proposes_configurations_of_every_entry():
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    search = Search.of(RANGES, "s")
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    found = [search.suggest(study.ask()) for _ in range(20)]
    assert {c.family for c in found} == {"prompt_lookup", "svip"}


def tree(branching):
    return {"drafter": {"kind": "tree", "branching": branching}}


def test_a_list_where_a_sequence_belongs_is_the_value_itself():
    entries = [tree([4, 2, 2, 1]), tree([2, [2, 0]]), tree({"choice": [[3, 1], [2, 2]]})]
    found = [c.drafter.branching for c in Search.of(entries, "s").grid()]
    assert found == [(4, 2, 2, 1), (2, (2, 0)), (3, 1), (2, 2)]
    bandit = {"kind": "bandit", "arms": [1, {"kind": "suffix", "max_tokens": [4, 8]}, 3]}
    arms = [c.drafter.arms for c in Search.of([{"drafter": bandit}], "s").grid()]
    assert [arm[1].max_tokens for arm in arms] == [4, 8]
    assert {(arm[0].depth, arm[2].depth) for arm in arms} == {(1, 3)}


def test_a_search_over_trees_never_leaves_its_budget():
    search = Search.of([tree({"trees": {"nodes": 10, "depth": 3, "most": 4}})], "s")
    grid = [c.drafter for c in search.grid()]
    assert {d.branching for d in grid} == {
        tuple(shape)
        for shape in [
            *([a] for a in range(1, 5)),
            *([a, b] for a in range(1, 5) for b in range(1, 5)),
            *([a, b, c] for a in range(1, 5) for b in range(1, 5) for c in range(1, 5)),
        ]
        if sum(math.prod(shape[: i + 1]) for i in range(len(shape))) <= 10
    }
    assert {c.drafter for c in search.draw(60, seed=0)} <= set(grid)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), direction="maximize")
    suggested = []
    for _ in range(60):
        trial = study.ask()
        suggested.append(search.suggest(trial).drafter)
        study.tell(trial, suggested[-1].nodes - suggested[-1].depth)
    assert set(suggested) <= set(grid)
    # It learns what a level is worth: wide and shallow trees have the highest value.
    assert np.mean([d.depth for d in suggested[-20:]]) < np.mean([d.depth for d in grid])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (lookup(ngram=3), "sweep.yaml: search.1: drafter.ngram: unknown key"),
        (lookup(max_tokens=[5, -1]), "search.1: drafter.max_tokens"),
        (lookup(max_tokens={"randint": [9, 2]}), "search.1: drafter.max_tokens: randint: expected"),
        (lookup(max_tokens={"uniform": "x"}), "search.1: drafter.max_tokens: uniform: expected"),
        (lookup(max_tokens={"loguniform": [0, 2]}), "low must be above 0"),
        (lookup(max_tokens=[]), "search.1: drafter.max_tokens: choice: expected a list"),
        (lookup(max_tokens={"randint": [2, 8]}), "a grid needs a list of values"),
        ("autoregressive", "search.1: expected a configuration"),
        (tree([8, 8, 8]), "tree: a tree of 584 nodes, at most 128 are possible"),
        (tree({"choice": [[2, 1], [8, 8, 8]]}), "search.1: drafter: tree: a tree of 584"),
        (tree({"trees": {"nodes": 500}}), "search.1: drafter.branching: trees: nodes: Input"),
        (tree({"trees": 8}), "search.1: drafter.branching: trees: value: expected {nodes: …}"),
        (tree([2, [1]]), "drafter.branching: level 1: 1 numbers for the 2 nodes before"),
    ],
)
def test_a_bad_entry_is_one_line_that_names_file_entry_and_key(entry, message):
    with pytest.raises(UserError) as caught:
        Search.of([FIXED, entry], "sweep.yaml").grid()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_ends_of_ranges_are_validated_before_anything_is_drawn():
    with pytest.raises(UserError, match="max_tokens"):
        Search.of([lookup(max_tokens={"randint": [1, 1000]})], "s").draw(1, seed=0)
    with pytest.raises(UserError, match="min_ngram 4 exceeds max_ngram 3"):
        Search.of([lookup(max_ngram={"randint": [3, 5]}, min_ngram=4)], "s").draw(1, seed=0)
