"""Drafters that reuse phrases: post-use and the token cache change no output."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.drafter import Outcome
from specdec_core.drafting.phrases import PhrasePool
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.post_use.drafter import PostUseDrafter
from specdec_core.drafting.post_use.settings import PostUseSettings
from specdec_core.drafting.token_cache import TokenCacheDrafter, TokenCacheSettings, useful_phrases
from specdec_core.engine import Engine, Request
from specdec_core.tokens import verification as verify
from specdec_core.tokens.statistics import Counts, TokenOrigin
from specdec_core.tokens.token_tree import ROOT, TokenTree
from tests.specdec_core.drafting.proofs import generate, sequence
from tests.specdec_core.fits import fit

SIX = FixedSettings(max_tokens=6)


def test_each_side_saves_its_own_forwards(tiny_pair):
    """Table 3's steps: the draft model's forwards at the draft, the target's at the target."""
    plain = Counts.of(generate(tiny_pair, DraftModelSettings(policy=SIX)))
    at_draft = Counts.of(generate(tiny_pair, PostUseSettings(policy=SIX, at_target=0)))
    generations = generate(tiny_pair, PostUseSettings(policy=SIX))
    both = Counts.of(generations)
    assert at_draft.n_drafted == plain.n_drafted
    assert at_draft.n_draft < 0.9 * plain.n_draft
    assert at_draft.n_target == plain.n_target > both.n_target
    assert sum(o is TokenOrigin.CACHE for g in generations for o in g.origins) > 5


NEAR = PostUseSettings(
    draft="near",
    policy=FixedSettings(max_tokens=2),
    anchors=2,
    cache=TokenCacheSettings(phrase_length=2, memory="all"),
)


def test_the_fit_notices_phrases_that_pass_for_drafted(monkeypatch):
    """Phrases after an anchor carry the distribution of the draft model's token after it."""
    propose = PostUseDrafter.propose

    def mistaken(self, sequences):
        trees = propose(self, sequences)
        for tree in trees:
            own = {
                p: q for p, q in zip(tree.parents, tree.draft_probs, strict=True) if q is not None
            }
            tree.draft_probs = [own.get(parent) for parent in tree.parents]
        return trees

    monkeypatch.setattr(PostUseDrafter, "propose", mistaken)
    assert fit(NEAR, Sampling(temperature=1.0)) < 1e-9


PROMPT = (9, 8, 11)  # the draft model continues it with four different tokens


def drafting(pair, **settings):
    """A drafter of chains of up to four, and a sequence with room for seven tokens."""
    drafter = PostUseSettings(policy=FixedSettings(max_tokens=4), **settings)
    engine = Engine(pair, Configuration(drafter=drafter))
    engine.add(Request("0", PROMPT, 20, ignore_eos=True))
    seen = []
    engine.drafter.observe = lambda sequence, outcome: seen.append(sequence)
    plan = engine.scheduler.plan()
    engine._enter(plan)
    [active] = engine._active.values()
    active.state.room = 7
    return engine.drafter, active.state


def test_phrases_follow_the_last_anchors_as_far_as_there_is_room(tiny_pair):
    drafter, sequence = drafting(tiny_pair, at_draft=0, anchors=2)
    [plain] = drafter.propose([sequence])
    assert plain.parents == list(range(-1, len(plain) - 1))
    chain = plain.tokens
    drafter.model.runner.truncate(0, 2)
    for key in chain[:3]:
        drafter.cache.learn(sequence, key, (201, 202, 203, 204, 205))
    drafter.cache.learn(sequence, chain[3], (311, 312, 313, 314, 315))
    drafter.cache.learn(sequence, chain[3], (316,))
    [tree] = drafter.propose([sequence])
    # Four of the chain; behind the third all that the room of seven allows; behind the fourth too.
    assert tree.tokens == [*chain, 201, 202, 203, 204, 316, 311, 312, 313]
    assert tree.parents == [ROOT, 0, 1, 2, 2, 4, 5, 6, 3, 3, 9, 10]
    assert tree.origins == [TokenOrigin.DRAFT] * 4 + [TokenOrigin.CACHE] * 8
    assert tree.depth == sequence.room


def test_of_a_short_chain_the_text_is_an_anchor_too(tiny_pair):
    drafter, sequence = drafting(tiny_pair, at_draft=0, anchors=3)
    drafter.policy.settings = FixedSettings(max_tokens=1)
    drafter.cache.learn(sequence, sequence.tokens[-1], (301, 302))
    [tree] = drafter.propose([sequence])
    assert tree.parents == [ROOT, ROOT, 1]
    assert tree.tokens[1:] == [301, 302]


@torch.inference_mode()
def test_what_the_draft_model_confirms_returns_to_the_cache(tiny_pair):
    drafter, sequence = drafting(tiny_pair, at_target=0)
    [plain] = drafter.propose([sequence])
    drafter.model.runner.truncate(0, 2)
    chain, key = plain.tokens, sequence.tokens[-1]
    drafter.cache.learn(sequence, key, (chain[0], 301, 302))
    drafter.cache.learn(sequence, key, (303, 304))
    [tree] = drafter.propose([sequence])
    assert tree.tokens == chain
    assert tree.draft_forwards == 3
    assert drafter.cache.phrases(sequence, key, 9) == [
        tuple(chain[:2]), (303, 304), (chain[0], 301, 302)
    ]  # fmt: skip


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


def test_a_phrase_is_learned_after_its_own_token_where_a_late_candidate_was_accepted():
    """A candidate of PEARL that the target has not read: the round adds no token of the target's
    own after it."""
    cache = TokenCacheDrafter(TokenCacheSettings(phrase_length=4))
    own = sequence([1, 2])
    cache.open([own])
    tree = TokenTree.chain([4], TokenOrigin.DRAFT)
    tree.graft(ROOT, [5], TokenOrigin.CACHE)
    tree.fed = len(tree)
    late = tree.add(6, 0, TokenOrigin.DRAFT)
    own.tokens += [4, 6]
    cache.observe(own, Outcome(tree, [0, late], [5, 6, 8], 0.0))
    assert {key: cache.phrases(own, key, 9) for key in (1, 2)} == {1: [], 2: [(5, 8)]}


@pytest.mark.parametrize(
    ("asked", "written", "known"),
    [
        ({"learn_from": "output"}, [4, 5, 6], {1: [], 2: [], 3: [(4, 5)], 4: [(5, 6)], 5: []}),
        ({"from_prompt": True}, [4], {1: [(2, 3)], 2: [(3, 4)], 3: []}),
    ],
)
def test_the_output_is_read_and_where_it_is_asked_for_the_prompt(asked, written, known):
    """The output from the prompt's last token on."""
    cache = TokenCacheDrafter(TokenCacheSettings(phrase_length=2, **asked))
    own = sequence([1, 2, 3])
    cache.open([own])
    own.tokens += written
    assert {key: cache.phrases(own, key, 9) for key in known} == known


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


TOKENS = st.integers(0, 4)
PHRASES = st.lists(TOKENS, min_size=1, max_size=4).map(tuple)
INSERTS = st.tuples(TOKENS, PHRASES)
LOOKUPS = st.tuples(TOKENS, st.integers(0, 4))
OPERATIONS = st.lists(st.one_of(INSERTS, LOOKUPS), max_size=80)


class SlowPool:
    """The same rules, read off a list of everything that happened."""

    def __init__(self, keys, per_key):
        self.keys, self.per_key = keys, per_key
        self.stacks: dict[int, list[tuple[int, ...]]] = {}
        self.uses: dict[int, list[int]] = {}
        self.clock = 0

    def insert(self, key, phrase):
        self.clock += 1
        if key not in self.stacks:
            if len(self.stacks) == self.keys:
                least = min(self.stacks, key=lambda k: (len(self.uses[k]), self.uses[k][-1]))
                del self.stacks[least], self.uses[least]
            self.stacks[key], self.uses[key] = [], [self.clock]
        stack = self.stacks[key]
        longer = [known for known in stack if known[: len(phrase)] == phrase]
        phrase = longer[-1] if longer else phrase
        kept = [known for known in stack if known != phrase[: len(known)]]
        self.stacks[key] = [*kept, phrase][-self.per_key :]

    def lookup(self, key, count):
        self.clock += 1
        if key not in self.stacks or count == 0:
            return []
        self.uses[key].append(self.clock)
        return self.stacks[key][::-1][:count]


@given(OPERATIONS, st.integers(1, 4), st.integers(1, 4))
def test_the_pool_does_what_the_slow_one_does(operations, keys, per_key):
    pool, slow = PhrasePool(keys, per_key), SlowPool(keys, per_key)
    for key, what in operations:
        if isinstance(what, tuple):
            pool.insert(key, what)
            slow.insert(key, what)
        else:
            assert pool.lookup(key, what) == slow.lookup(key, what)
    assert pool._stacks.keys() == slow.stacks.keys()
