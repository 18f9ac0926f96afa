"""Token trees keep parents before children, and phrases share what they say alike."""

from hypothesis import given
from hypothesis import strategies as st

from specdec_core.tokens.statistics import TokenOrigin
from specdec_core.tokens.token_tree import ROOT, TokenTree
from tests.specdec_core.drafting.proofs import paths

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
    assert tree.is_chain
    tree.graft(0, [9], TokenOrigin.CACHE)
    assert not tree.is_chain
    assert tree.depths() == [0, 1, 2, 1]
