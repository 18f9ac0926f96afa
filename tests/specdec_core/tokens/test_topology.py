"""Token trees, and the masks that their parents ask for."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.engine import Engine, Request
from specdec_core.tokens.statistics import TokenOrigin
from specdec_core.tokens.token_tree import ROOT, TokenTree
from specdec_core.tokens.topology import Topologies, after_text, static_tree
from tests.specdec_core.drafting.proofs import paths
from tests.specdec_core.kinds import configured

POSITIONS = 80


@st.composite
def trees(draw):
    """The parents of any tree (or several side by side) of up to 12 nodes."""
    size = draw(st.integers(1, 12))
    return [draw(st.integers(ROOT, node - 1)) for node in range(size)]


@st.composite
def fed(draw):
    """A tree, how many of its nodes a forward feeds, and where in the cache it begins."""
    parents = draw(trees())
    return parents, draw(st.integers(1, len(parents))), draw(st.integers(0, 20))


def sees(parents, start, node, column, window):
    """Whether a node may attend to a column of the cache, the slow way."""

    def depth(n):
        return 0 if parents[n] == ROOT else depth(parents[n]) + 1

    if column < start:
        place, related = column, True
    elif column - start < len(parents):
        place, related, above = start + depth(column - start), False, node
        while above != ROOT:
            related = related or above == column - start
            above = parents[above]
    else:
        return False
    return related and (window is None or start + depth(node) - place < window)


def check(known, parents, count, start, window):
    """Compare the mask and the depths of the last `count` nodes with the slow way."""
    topology, nodes = known.find(parents, count), range(len(parents) - count, len(parents))
    mask = topology.mask(start, nodes, window)
    assert mask.shape == (count, start + len(parents))
    for row, node in enumerate(nodes):
        expected = [sees(parents, start, node, c, window) for c in range(mask.shape[1])]
        assert (mask[row] == 0).tolist() == expected
        assert mask[row].isfinite().all()
        above, place = 0, node
        while parents[place] != ROOT:
            place, above = parents[place], above + 1
        assert topology.depths[node] == above


@settings(max_examples=80)
@given(fed(), st.sampled_from([None, 1, 2, 5, 30]))
def test_a_mask_is_what_the_parents_say(given, window):
    check(Topologies(torch.float32, "cpu"), *given, window)


@settings(max_examples=80)
@given(st.data())
def test_a_slice_of_the_big_mask_is_the_mask_of_the_cut_tree(data):
    """k-configurations cut after any level, a level of them at a time, with and without the
    sequence's last token before them, as draft and target feed them."""
    branching = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    window = data.draw(st.sampled_from([None, 2, 5]))
    whole = static_tree([n] * prod(branching[:level]) for level, n in enumerate(branching))
    if data.draw(st.booleans()):
        whole = after_text(1, whole)
    known = Topologies(torch.float32, "cpu")
    big = known.expect(whole)
    ends = [n for n in range(1, len(whole)) if big.depths[n] > big.depths[n - 1]]
    cut = data.draw(st.sampled_from([*ends, len(whole)]))
    first = data.draw(st.sampled_from([0, *(end for end in ends if end < cut)]))
    assert known.find(whole[:cut]) is big
    check(known, whole[:cut], cut - first, data.draw(st.integers(0, 10)), window)


@pytest.mark.parametrize("window", [None, 1, 4])
def test_a_chain_is_the_tree_of_width_one_and_of_all_lengths_a_slice_of_one_mask(window):
    known = Topologies(torch.float32, "cpu")
    longest = known.chain(POSITIONS)
    for count in (1, 2, 7, POSITIONS):
        assert known.chain(count) is longest
        tree = known.find(range(-1, count - 1)).mask(9, range(count), window)
        assert torch.equal(longest.mask(9, range(count), window), tree)


def test_shapes_are_numbered_level_by_level():
    assert static_tree([(2,), (2, 2)]) == [ROOT, ROOT, 0, 0, 1, 1]
    assert static_tree([(3,), (2, 0, 1)]) == [ROOT, ROOT, ROOT, 0, 0, 2]
    assert after_text(1, static_tree([(2,), (1, 1)])) == [ROOT, 0, 0, 1, 2]
    assert after_text(3, [ROOT, 0, 0]) == [ROOT, 0, 1, 2, 3, 3]
    assert after_text(0, [ROOT, ROOT, 1]) == [ROOT, ROOT, 1]


@pytest.mark.parametrize(
    "drafter",
    [
        {"kind": "tree", "branching": (3, (2, 0, 1))},
        {"kind": "fork", "policy": {"kind": "svip", "threshold": 0.9, "max_tokens": 6}},
    ],
    ids=["tree", "fork"],
)
def test_one_mask_a_model_is_built_at_the_start_and_none_while_decoding(tiny_pair, drafter):
    engine = Engine(tiny_pair, configured(drafter), slots=2)
    requests = [Request(str(i), (5 + i,), 40, ignore_eos=True) for i in range(3)]
    later = [Request(f"later {i}", (5 + i, 9, 4), 40, ignore_eos=True) for i in range(3)]
    runners = [engine.target, engine.drafts.open(None)]
    built = [set(map(id, runner.topologies._known.values())) for runner in runners]
    assert list(map(len, built)) == [1, 1]
    for asked in (requests, later):
        accepted = sum(r.accepted for g in engine.generate(asked) for r in g.rounds)
        assert accepted > 0
    assert [set(map(id, r.topologies._known.values())) for r in runners] == built


phrases = st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=8)


@given(phrases)
def test_grafted_phrases_make_the_trie_of_their_prefixes(phrases):
    tree = TokenTree()
    for phrase in phrases:
        last = tree.graft(ROOT, phrase, TokenOrigin.CACHE)
        assert last == ROOT if not phrase else tree.tokens[last] == phrase[-1]
    prefixes = {tuple(phrase[:n]) for phrase in phrases for n in range(1, len(phrase) + 1)}
    assert sorted(paths(tree)) == sorted(prefixes), "each path is there once"
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert tree.depth == max(map(len, phrases), default=0)


@given(phrases)
def test_children_lists_every_node_once_in_the_order_added(phrases):
    tree = TokenTree()
    for phrase in phrases:
        tree.graft(ROOT, phrase, TokenOrigin.CACHE)
    children = tree.children()
    assert sorted(node for own in children.values() for node in own) == list(range(len(tree)))
    assert all(own == sorted(own) for own in children.values())


def test_a_phrase_grafted_onto_a_drawn_node_keeps_the_distribution_it_was_drawn_from():
    tree = TokenTree.chain([5, 6], TokenOrigin.DRAFT)
    last = tree.graft(0, [6, 7], TokenOrigin.CACHE)
    assert tree.tokens == [5, 6, 7]
    assert tree.parents == [ROOT, 0, 1]
    assert last == 2
    assert tree.origins == [TokenOrigin.DRAFT, TokenOrigin.DRAFT, TokenOrigin.CACHE]
    tree.graft(0, [9], TokenOrigin.CACHE)
    assert tree.depths() == [0, 1, 2, 1]
