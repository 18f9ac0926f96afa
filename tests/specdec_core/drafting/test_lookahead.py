"""Lookahead decoding: the window's tokens and places, the n-grams that come out of it, and that the
output stays the target's."""

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.config import Configuration
from specdec_core.drafting.drafter import Outcome
from specdec_core.drafting.lookahead import LookaheadDrafter, LookaheadSettings, LookaheadWindow
from specdec_core.engine import Engine
from specdec_core.tokens.token_tree import TokenTree
from tests.specdec_core.drafting.proofs import paths, requests, sequence

Choice = Callable[[tuple[int, ...]], int]  # the target's own token after the text and a path


def choices(tree, choose):
    return [choose(path) for path in [(), *paths(tree)]]


@given(st.integers(1, 6), st.integers(2, 5), st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_the_guess_of_level_i_and_column_j_is_read_i_plus_j_places_on(columns, ngram, text):
    window = LookaheadWindow(columns, ngram, text)
    for _ in range(2 * ngram):
        tree, levels = TokenTree(), [list(level) for level in window.levels]
        window.plant(tree, text[-1], room=100)
        levels[0][0] = text[-1]
        found = [(), *paths(tree)]
        for i, nodes in enumerate(window._nodes):
            for j, node in enumerate(nodes):
                upto = levels[0][1 : j + 1] + [levels[k][j] for k in range(1, i + 1)]
                assert found[node + 1] == tuple(upto)
                assert len(upto) == i + j
        assert len(tree) <= LookaheadSettings(window=columns, ngram=ngram).nodes
        assert len(set(found)) == len(found)
        ngrams = window.advance(choices(tree, lambda path: (sum(path) + len(path)) % 4), text)
        assert all(len(gram) == ngram for gram in ngrams)
        assert len(ngrams) == (columns if len(levels) == ngram - 1 else 0)


def opened(settings, text):
    drafter, own = LookaheadDrafter(settings, None), sequence(text)
    drafter.open([own])
    return drafter, own


def test_ngrams_of_the_last_token_are_the_first_candidates():
    settings = LookaheadSettings(window=1, ngram=3, guesses=2)
    drafter, own = opened(settings, [1, 2, 3, 1, 4, 5, 1, 6, 7, 1])
    [tree] = drafter.propose([own])
    assert paths(tree) == [(6,), (6, 7), (4,), (4, 5)]
    own.tokens += [8, 1]
    drafter.observe(own, Outcome(tree, [], [8, 9, 9, 9, 9], 0.0))
    [tree] = drafter.propose([own])  # the window's second level, a guess behind the last token
    assert paths(tree)[4:] == [(1,)] or paths(tree)[4:] == [(8,)]


def test_nothing_reaches_beyond_the_request():
    drafter, own = opened(LookaheadSettings(window=3, ngram=3, guesses=2), [1, 2, 3, 4, 1])
    for room, depth in ((0, 0), (1, 1), (2, 2), (9, 3)):
        own.room = room
        [tree] = drafter.propose([own])
        assert tree.depth == depth
        before = drafter._windows[0].levels
        drafter.observe(own, Outcome(tree, [], [0] * (len(tree) + 1), 0.0))
        assert (drafter._windows[0].levels == before) == (room < 2)  # it waits


@torch.inference_mode()
def test_ngrams_in_the_pool_are_what_the_target_chose(tiny_pair):
    """The last token of every n-gram of the window is the target's choice behind what the column
    saw, recomputed without a cache or a mask."""
    drafter = LookaheadSettings(window=4, ngram=3, from_prompt=False)
    engine = Engine(tiny_pair, Configuration(drafter=drafter), slots=3)
    observe, checked = engine.drafter.observe, 0

    def check(sequence, outcome):
        nonlocal checked
        window = engine.drafter._windows[sequence.slot]
        nodes = list(window._nodes)
        observe(sequence, outcome)
        if not nodes or checked > 60:
            return
        text = sequence.tokens[: len(sequence.tokens) - outcome.accepted - 1]
        found = [(), *paths(outcome.tree)]
        for node, chosen in zip(nodes[-1], window.levels[-1], strict=False):
            if len(nodes) == 2:
                ids = torch.tensor([[*text, *found[node + 1]]])
                assert tiny_pair.target(ids).logits[0, -1].argmax() == chosen
                checked += 1

    engine.drafter.observe = check
    engine.generate(requests())
    assert checked > 60
