"""The token cache learns USEFUL tokens, looks them up behind the last one, and stays lossless."""

import torch

from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.post_use.settings import PostUseSettings
from specdec_core.drafting.token_cache import TokenCacheDrafter, TokenCacheSettings, useful_phrases
from specdec_core.engine import Engine, Request
from specdec_core.tokens import verification as verify
from specdec_core.tokens.statistics import TokenOrigin
from specdec_core.tokens.token_tree import ROOT
from tests.specdec_core.drafting.proofs import sequence
from tests.specdec_core.fits import fit

SHORT = TokenCacheSettings(phrases=3, phrase_length=2, memory="all")


def test_the_fit_notices_rejected_phrases_that_stay_possible(monkeypatch):
    monkeypatch.setattr(verify, "residual", lambda p, token, q: p)
    assert fit(SHORT, Sampling(temperature=1.0)) < 1e-9


@torch.inference_mode()
def test_useful_tokens_are_those_that_the_target_itself_would_write(tiny_pair):
    """Eq. 7, with the target's choices computed one sequence at a time, without a cache. The cache
    learns them (the paper's Figure 1)."""
    target = tiny_pair.target
    drafter = PostUseSettings(policy=FixedSettings(max_tokens=5))
    engine = Engine(tiny_pair, Configuration(drafter=drafter))
    observe, phrases_seen, behind_rejections = engine.drafter.cache.observe, 0, 0
    learned: list[bool] = []

    def check(sequence, outcome):
        nonlocal phrases_seen, behind_rejections
        tree = outcome.tree
        text = sequence.tokens[: len(sequence.tokens) - outcome.accepted - 1]

        def path(node):
            return [] if node == ROOT else [*path(tree.parents[node]), node]

        def choice(node):
            drafted = [tree.tokens[n] for n in path(node)]
            return int(target(torch.tensor([text + drafted])).logits[0, -1].argmax())

        useful = {n for n in range(len(tree)) if tree.tokens[n] == choice(tree.parents[n])}
        assert set(outcome.path) <= useful
        expected = set()
        for node in useful - set(outcome.path):
            run = [node]
            while len(run) < 3 and (after := [n for n in useful if tree.parents[n] == run[-1]]):
                run.append(after[0])
            phrase = [tree.tokens[n] for n in run]
            phrase += [choice(run[-1])] if len(run) < 3 else []
            parent = tree.parents[node]
            key = text[-1] if parent == ROOT else tree.tokens[parent]
            expected.add((key, *phrase))
            behind_rejections += parent not in (ROOT, *outcome.path)
        found = [(key, *phrase) for key, phrase in useful_phrases(outcome, text[-1], 3)]
        assert set(found) == expected
        phrases_seen += len(found)
        observe(sequence, outcome)
        for key, *phrase in found[-3:]:
            known = engine.drafter.cache.phrases(sequence, key, 99)
            learned.append(any(own[: len(phrase)] == tuple(phrase) for own in known))

    engine.drafter.cache.observe = check
    text = engine.encode("def add(a, b):\n    return a + b\n\ndef add(a, b):\n")
    engine.generate([Request("0", text, 60, ignore_eos=True)])
    assert phrases_seen > 5
    assert behind_rejections > 5
    assert all(learned[-20:])


def test_the_output_is_read_from_the_prompts_last_token_on():
    cache = TokenCacheDrafter(TokenCacheSettings(phrase_length=2, learn_from="output"))
    own = sequence([1, 2, 3])
    cache.open([own])
    own.tokens += [4, 5, 6]
    assert [cache.phrases(own, key, 9) for key in (1, 2, 3, 4, 5)] == [
        [],
        [],
        [(4, 5)],
        [(5, 6)],
        [],
    ]


def test_the_prompt_is_read_where_it_is_asked_for():
    cache = TokenCacheDrafter(TokenCacheSettings(phrase_length=2, from_prompt=True))
    own = sequence([1, 2, 3])
    cache.open([own])
    own.tokens += [4]
    assert [cache.phrases(own, key, 9) for key in (1, 2, 3)] == [[(2, 3)], [(3, 4)], []]


def test_phrases_behind_a_draft_share_their_beginnings_in_the_tree():
    cache = TokenCacheDrafter(TokenCacheSettings(phrase_length=3))
    own = sequence([1])
    cache.open([own])
    for phrase in [(4, 5, 6), (4, 7, 8), (9, 9, 9, 9)]:
        cache.learn(own, 3, phrase)
    found = cache.find(own, [2, 3], room=2)
    assert found.match == 1
    assert found.tree.tokens == [9, 9, 4, 7, 5]
    assert found.tree.parents == [ROOT, 0, ROOT, 2, 2]
    assert set(found.tree.origins) == {TokenOrigin.CACHE}
    assert len(cache.find(own, [2, 4], room=2).tree) == 0


def test_what_a_request_learned_serves_others_only_with_memory_for_all():
    for memory, kept in (("request", []), ("all", [(2, 3), (5, 6)])):
        cache = TokenCacheDrafter(TokenCacheSettings(phrase_length=4, memory=memory))
        first = sequence([1])
        cache.open([first])
        cache.learn(first, 7, (5, 6))
        first.tokens += [2, 3]
        cache.close(first)
        second = sequence([1])
        cache.open([second])
        assert cache.phrases(second, 1, 9) + cache.phrases(second, 7, 9) == kept
