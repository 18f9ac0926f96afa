"""Hybrids: the lookup where it finds enough, the other drafter elsewhere, or both in one tree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.hybrid import HybridSettings, merged
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.engine import Engine, Request
from specdec_core.tokens.statistics import TokenOrigin
from specdec_core.tokens.token_tree import ROOT, TokenTree
from tests.specdec_core.drafting.proofs import paths, proposals, requests, sequence
from tests.specdec_core.kinds import configured

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
    assert tree.is_chain


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
