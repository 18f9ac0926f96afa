"""Post-use reuses phrases at the draft model and at the target, and changes no text."""

import torch

from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.post_use.drafter import PostUseDrafter
from specdec_core.drafting.post_use.settings import PostUseSettings
from specdec_core.drafting.token_cache import TokenCacheSettings
from specdec_core.engine import Engine, Request
from specdec_core.tokens.statistics import Counts, TokenOrigin
from specdec_core.tokens.token_tree import ROOT
from tests.specdec_core.drafting.proofs import generate
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
    assert plain.is_chain
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
