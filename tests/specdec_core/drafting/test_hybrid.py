"""Hybrids and cascades: drafters that are made of others, with the target's output."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.config import Sampling
from specdec_core.drafting import chain
from specdec_core.drafting.chain import ChainDrafter
from specdec_core.drafting.draft_model.settings import CascadeSettings, DraftModelSettings
from specdec_core.drafting.drafter import Resources, SlotState
from specdec_core.drafting.hybrid import HybridSettings, merged
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.token_cache import TokenCacheSettings
from specdec_core.engine import Engine, Request
from specdec_core.tokens.acceptance import rule_of
from specdec_core.tokens.sampling import RandomStream, draw, warp
from specdec_core.tokens.statistics import Counts, TokenOrigin
from specdec_core.tokens.token_tree import ROOT, TokenTree
from specdec_core.tokens.verification import Verdict
from tests.conftest import save_random_head
from tests.specdec_core.drafting.proofs import generate, paths, proposals, requests, sequence
from tests.specdec_core.fits import fit
from tests.specdec_core.kinds import configured, policy

CHAIN = DraftModelSettings(policy=FixedSettings(max_tokens=4))


@st.composite
def trees(draw, origin):
    """Small trees of few tokens, siblings unlike each other."""
    tree = TokenTree()
    for _ in range(draw(st.integers(0, 8))):
        parent = draw(st.integers(-1, len(tree) - 1))
        tree.graft(parent, [draw(st.integers(0, 3))], origin)
    return tree


@given(trees(TokenOrigin.DRAFT), trees(TokenOrigin.LOOKUP))
def test_a_merged_tree_has_the_paths_of_both_once(drafted, found):
    tree = merged(drafted, (ROOT, found))
    assert set(paths(tree)) == {*paths(drafted), *paths(found)}
    assert len(set(paths(tree))) == len(tree)
    assert tree.tokens[: len(drafted)] == drafted.tokens
    assert tree.parents[: len(drafted)] == drafted.parents
    assert set(tree.origins[len(drafted) :]) <= {TokenOrigin.LOOKUP}


def watch(engine):
    """The outcomes that the hybrid's other drafter observes, each with the text at that time."""
    seen, other = [], engine.drafter.otherwise
    observe = other.observe

    def record(sequence, outcome):
        seen.append((list(sequence.tokens), outcome))
        observe(sequence, outcome)

    other.observe = record
    return seen


@pytest.mark.parametrize("merge", [False, True])
def test_the_other_drafter_learns_its_own_part_of_the_rounds(tiny_pair, merge):
    hybrid = HybridSettings(otherwise=CHAIN, merge=merge, min_match=2, extend=True)
    engine = Engine(tiny_pair, configured(hybrid), slots=3)
    seen = watch(engine)
    generations = engine.generate(requests())
    rounds = [r for g in generations for r in g.rounds[1:]]  # the first has no candidates
    cut = 0
    for text, outcome in seen:
        tree, path = outcome.tree, outcome.path
        assert set(tree.origins) <= {TokenOrigin.DRAFT}
        assert len(outcome.choices) >= len(tree) + 1
        tokens = [tree.tokens[node] for node in path]
        end = path[-1] if path else -1
        # The text ends in the path and in what the target chose behind it.
        assert text[-len(path) - 1 :] == [*tokens, outcome.choices[end + 1]]
        cut += text != [] and len(path) < len(tree)
    drafting = sum(r.draft_forwards > 0 for r in rounds)
    # Not of a request's last round; without merging, not of rounds that a lookup proposed.
    assert drafting - len(generations) <= len(seen) <= len(rounds) - len(generations)
    assert (drafting < len(rounds) - len(generations)) == (not merge)
    assert cut > 0


def test_the_draft_models_cache_stays_a_prefix_of_the_text(tiny_pair):
    """What it drafts after lookups is what it drafts on a fresh cache."""
    hybrid = HybridSettings(otherwise=CHAIN, merge=True, min_match=2, extend=True)
    engine, fresh = Engine(tiny_pair, configured(hybrid), 3), Engine(tiny_pair, configured(CHAIN))
    seen = proposals(engine.drafter.otherwise)
    engine.generate(requests())
    for text, room, _, tree in seen:
        alone = sequence(text, room=room)
        fresh.drafter.model.runner.truncate(0, 0)
        fresh.drafter.open([alone])
        [expected] = fresh.drafter.propose([alone])
        assert tree.tokens == expected.tokens
    assert sum(len(own.tree) for own in seen) > 50


def test_a_draft_goes_on_with_what_is_found_behind_it(tiny_pair):
    # The lookup finds nothing after the target's first token, but it does after the draft.
    text = (*range(10, 30), 5)
    extended = HybridSettings(otherwise=CHAIN, min_match=4, extend=True)
    engine = Engine(tiny_pair, configured(extended))
    hybrid, shown = engine.drafter, proposals(engine.drafter)
    drafted = TokenTree.chain([10, 11, 12], TokenOrigin.DRAFT)
    hybrid.otherwise.propose = lambda sequences: [drafted]
    hybrid.otherwise._lengths[0] = len(drafted)
    engine.add(Request("r", text, 8))
    engine.step()
    assert not shown, "nothing is proposed in the first round"
    engine.step()
    [(_, _, _, tree)] = shown
    assert tree.tokens == [10, 11, 12, 13, 14, 15]  # as deep as the request has room
    assert tree.origins[3:] == [TokenOrigin.LOOKUP] * 3
    assert tree.parents == list(range(-1, len(tree) - 1))


@pytest.mark.parametrize(
    "lookup", [{"kind": "token_cache"}, {"kind": "prompt_lookup", "max_ngram": 1}]
)
def test_a_lookup_that_looks_for_one_token_is_asked_for_no_more(tiny_pair, lookup):
    settings = HybridSettings.model_validate({"lookup": lookup, "min_match": 3})
    engine = Engine(tiny_pair, configured(settings))
    (found,) = engine.generate([Request("r", (5, 6, 5, 6, 5), 24, ignore_eos=True)])
    assert {TokenOrigin.LOOKUP, TokenOrigin.CACHE} & {*found.origins}


def test_slots_without_a_hit_are_drafted_together(tiny_pair):
    engine = Engine(tiny_pair, configured(HybridSettings(otherwise=CHAIN)), slots=3)
    hybrid, sizes = engine.drafter, []
    propose = hybrid.otherwise.propose

    def record(sequences):
        sizes.append(len(sequences))
        return propose(sequences)

    hybrid.otherwise.propose = record
    engine.generate(requests())
    assert set(sizes) == {1, 2, 3}


GREEDY = Sampling()
COUPLED = Sampling(temperature=1.0, coupling="gumbel")
CACHE = TokenCacheSettings(phrases=3, phrase_length=4)


def rounds(generations):
    """What the length policy decided and what became of it."""
    return [(r.position, r.drafted, r.accepted) for g in generations for r in g.rounds]


@pytest.mark.parametrize(
    ("length", "sampling"),
    [(policy("svip", threshold=2.3), COUPLED), (policy("heuristic", start=3), GREEDY)],
    ids=["svip", "heuristic"],
)
def test_the_chain_is_the_draft_models_own_and_ends_where_the_policy_says(
    tiny_pair, length, sampling
):
    plain = generate(tiny_pair, DraftModelSettings(policy=length), 1, sampling)
    cascade = CascadeSettings(policy=length, proposer=TokenCacheSettings())
    guessed = generate(tiny_pair, cascade, 1, sampling)
    assert rounds(guessed) == rounds(plain)
    assert Counts.of(guessed).n_draft < Counts.of(plain).n_draft


def test_a_head_reads_each_tokens_own_hidden_state(tiny_pair, tmp_path):
    save_random_head(tiny_pair, "specdecpp", tmp_path / "head")
    length = policy("specdecpp", head=str(tmp_path / "head"), threshold=0.8)
    plain = generate(tiny_pair, DraftModelSettings(policy=length), slots=3)
    guessed = generate(tiny_pair, CascadeSettings(policy=length, proposer=CACHE), slots=3)
    assert rounds(guessed) == rounds(plain)
    assert len({r.drafted for g in plain for r in g.rounds}) > 3
    assert Counts.of(guessed).n_draft < Counts.of(plain).n_draft


@torch.inference_mode()
def test_every_sampled_token_carries_the_draft_models_distribution(tiny_pair):
    sampling = Sampling(temperature=0.4, top_k=8)
    drafter = CascadeSettings(proposer=CACHE, policy=policy("fixed", max_tokens=6))
    engine = Engine(tiny_pair, configured(drafter, sampling), slots=2)
    model, seen, foreseen = tiny_pair.drafts["draft"], proposals(engine.drafter), 0
    prompt = engine.encode("x = 1\ny = 2\nx = 1\ny = 2\n")
    engine.generate([Request(str(i), prompt, 40, seed=i, ignore_eos=True) for i in range(3)])
    for text, _, _, tree in seen:
        foreseen += len(tree) - tree.draft_forwards
        assert tree.parents == list(range(-1, len(tree) - 1))
        if len(tree):
            logits = model(torch.tensor([text + tree.tokens])).logits[0, len(text) - 1 : -1]
            expected = warp(logits, sampling)
            torch.testing.assert_close(torch.stack(tree.draft_probs), expected, atol=1e-4, rtol=0)
    assert foreseen > 20


SHORT = CascadeSettings(
    draft="near",
    proposer=TokenCacheSettings(phrases=3, phrase_length=2, memory="all"),
    policy=policy("fixed", max_tokens=3),
)


class AnyPossibleGuess(type(rule_of(Sampling(temperature=1.0)))):
    """A wrong rule for what a draft model draws: a guess wherever it is possible at all."""

    def verify(self, reading, choices):
        tree, _, probs, random, _ = reading
        guesses = tree.children().get(ROOT, [])
        possible = [node for node in guesses if probs[0, tree.tokens[node]] > 0]
        [own] = draw(probs[:1], [random.uniform()])
        return Verdict([], tree.tokens[possible[0]] if possible else own, corrected=False)


def test_the_fit_notices_chains_that_were_not_drawn_from_the_distribution_they_carry(monkeypatch):
    monkeypatch.setattr(chain, "rule_of", lambda sampling: AnyPossibleGuess())
    assert fit(SHORT, Sampling(temperature=1.0)) < 1e-9


class Foreseeing(ChainDrafter):
    """Guesses the tokens of `told`."""

    told: dict[int, list[int]]

    def guess(self, sequence, drafted, room):
        tree = TokenTree()
        tree.graft(ROOT, [5], TokenOrigin.CACHE)
        tree.graft(ROOT, self.told[sequence.slot][len(drafted) :][:room], TokenOrigin.CACHE)
        return tree


@torch.inference_mode()
def test_a_perfect_guess_takes_one_forward_and_leaves_the_cache_in_step(tiny_pair):
    seven = policy("fixed", max_tokens=7)
    engine = Engine(tiny_pair, configured(DraftModelSettings(policy=seven)), slots=2)
    sequences = [
        SlotState(slot, list(tokens), GREEDY, RandomStream(0, 320), room=7)
        for slot, tokens in enumerate([(9, 8, 7, 6), (3, 4)])
    ]
    engine.drafter.open(sequences)
    plain = engine.drafter.propose(sequences)
    runner = engine.drafter.model.runner
    for slot in (0, 1):
        runner.truncate(slot, 0)
    resources = Resources(lambda name: runner, print, engine.target.vocab_size, frozenset())
    drafter = Foreseeing(DraftModelSettings(policy=seven), resources)
    drafter.told = {slot: tree.tokens for slot, tree in enumerate(plain)}
    drafter.open(sequences)
    trees = drafter.propose(sequences)
    assert [tree.tokens for tree in trees] == [tree.tokens for tree in plain]
    assert [tree.draft_forwards for tree in trees] == [1, 1]
    assert runner.lengths == [4 + 6, 2 + 6]
