"""Hybrids: the lookup where it finds enough, the other drafter elsewhere, or both in one tree."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from research.drift.toy_pair import FAR, NEAR
from specdec_core.config import Configuration, DrafterSettings, Sampling
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.drafter import Outcome, SlotState
from specdec_core.drafting.dynamic_tree.settings import DynamicTreeSettings
from specdec_core.drafting.hybrid import HybridSettings, merged
from specdec_core.drafting.lookahead import LookaheadSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.drafting.schedule.settings import ScheduleSettings
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.drafting.target_started.settings import TargetTreeSettings
from specdec_core.drafting.token_cache import TokenCacheSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.statistics import TokenOrigin
from specdec_core.tokens.token_tree import ROOT, TokenTree
from tests.specdec_core.drafting.proofs import assert_exact, assert_greedy_identity, paths, requests

CHAIN = DraftModelSettings(policy=FixedSettings(max_tokens=4))
HYBRIDS = {
    "else": HybridSettings(otherwise=CHAIN),
    "merged": HybridSettings(otherwise=CHAIN, merge=True),
    "merged-tree": HybridSettings(
        lookup=PromptLookupSettings(max_tokens=4), otherwise=DynamicTreeSettings(), merge=True
    ),
    "extended": HybridSettings(otherwise=CHAIN, min_match=4, extend=True),
    "extended-tree": HybridSettings(otherwise=DynamicTreeSettings(), merge=True, extend=True),
    "lookahead": HybridSettings(otherwise=LookaheadSettings(), min_match=3),
    "cache": HybridSettings(lookup=TokenCacheSettings(), otherwise=CHAIN, min_match=1, merge=True),
    "nested": HybridSettings(
        min_match=3,
        otherwise=HybridSettings(lookup=PromptLookupSettings(), otherwise=CHAIN, merge=True),
    ),
    "bandit": HybridSettings(
        otherwise=BanditSettings(arms=(CHAIN, DraftModelSettings())), merge=True
    ),
}


@st.composite
def trees(draw: st.DrawFn, origin: TokenOrigin) -> TokenTree:
    """Small trees of few tokens, siblings unlike each other."""
    tree = TokenTree()
    for _ in range(draw(st.integers(0, 8))):
        parent = draw(st.integers(-1, len(tree) - 1))
        tree.graft(parent, [draw(st.integers(0, 3))], origin)
    return tree


@given(trees(TokenOrigin.DRAFT), trees(TokenOrigin.LOOKUP))
def test_a_merged_tree_has_the_paths_of_both_once(drafted: TokenTree, found: TokenTree) -> None:
    tree = merged(drafted, (ROOT, found))
    assert set(paths(tree)) == {*paths(drafted), *paths(found)}
    assert len(set(paths(tree))) == len(tree)
    assert tree.tokens[: len(drafted)] == drafted.tokens
    assert tree.parents[: len(drafted)] == drafted.parents
    assert set(tree.origins[len(drafted) :]) <= {TokenOrigin.LOOKUP}


@pytest.mark.parametrize("hybrid", HYBRIDS)
def test_greedy_output_is_the_targets_own(tiny_pair: Pair, hybrid: str) -> None:
    generations = assert_greedy_identity(tiny_pair, HYBRIDS[hybrid])
    if hybrid in ("else", "merged", "extended"):
        origins = {origin for g in generations for origin in g.origins}
        assert origins >= {TokenOrigin.DRAFT, TokenOrigin.LOOKUP}, "one of the two was never right"


def watch(engine: Engine) -> list[tuple[SlotState, Outcome]]:
    """What the other drafter of the engine's hybrid is told, with its text at that time."""
    seen, other = [], engine.drafter.otherwise
    observe = other.observe

    def record(sequence: SlotState, outcome: Outcome) -> None:
        seen.append((list(sequence.tokens), outcome))
        observe(sequence, outcome)

    other.observe = record
    return seen


@pytest.mark.parametrize("merge", [False, True])
def test_the_other_drafter_learns_its_own_part_of_the_rounds(tiny_pair: Pair, merge: bool) -> None:
    drafter = HybridSettings(otherwise=CHAIN, merge=merge, min_match=2, extend=True)
    engine = Engine(tiny_pair, Configuration(drafter=drafter), slots=3)
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


def test_the_draft_models_cache_stays_a_prefix_of_the_text(tiny_pair: Pair) -> None:
    """What it drafts after lookups is what it drafts on a fresh cache."""
    drafter = HybridSettings(otherwise=CHAIN, merge=True, min_match=2, extend=True)
    engine = Engine(tiny_pair, Configuration(drafter=drafter), slots=3)
    chain = engine.drafter.otherwise
    propose, fresh = chain.propose, Engine(tiny_pair, Configuration(drafter=CHAIN), slots=1)
    checked = 0

    def compare(sequences: Sequence[SlotState]) -> list[TokenTree]:
        nonlocal checked
        drafted = propose(sequences)
        for sequence, tree in zip(sequences, drafted, strict=True):
            alone = SlotState(0, sequence.tokens, Sampling(), sequence.random, sequence.room)
            fresh.drafter.model.runner.truncate(0, 0)
            fresh.drafter.open([alone])
            [expected] = fresh.drafter.propose([alone])
            assert tree.tokens == expected.tokens
            checked += len(tree)
        return drafted

    chain.propose = compare
    engine.generate(requests())
    assert checked > 50


def test_a_draft_goes_on_with_what_is_found_behind_it(tiny_pair: Pair) -> None:
    # Nothing is known behind the text and the target's first token, but behind the draft it is.
    text = (*range(10, 30), 5)
    engine = Engine(tiny_pair, Configuration(drafter=HYBRIDS["extended"]))
    hybrid, shown = engine.drafter, []
    drafted = TokenTree.chain([10, 11, 12], TokenOrigin.DRAFT)
    hybrid.otherwise.propose = lambda sequences: [drafted]
    hybrid.otherwise._lengths[0] = len(drafted)
    propose = hybrid.propose
    hybrid.propose = lambda sequences: [shown.append(t := propose(sequences)) or t[0]]
    engine.add(Request("r", text, 8))
    engine.step()
    assert not shown, "nobody is asked in the first round"
    engine.step()
    [[tree]] = shown
    assert tree.tokens == [10, 11, 12, 13, 14, 15]  # as deep as the request has room
    assert tree.origins[3:] == [TokenOrigin.LOOKUP] * 3
    assert tree.is_chain


def test_slots_without_a_hit_are_drafted_together(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, Configuration(drafter=HYBRIDS["else"]), slots=3)
    hybrid, sizes = engine.drafter, []
    propose = hybrid.otherwise.propose

    def record(sequences: Sequence[SlotState]) -> list[TokenTree]:
        sizes.append(len(sequences))
        return propose(sequences)

    hybrid.otherwise.propose = record
    engine.generate(requests())
    assert set(sizes) == {1, 2, 3}


@pytest.mark.parametrize(
    ("otherwise", "sampling"),
    [
        (
            DraftModelSettings(draft=NEAR, policy=FixedSettings(max_tokens=1)),
            Sampling(temperature=1),
        ),
        (DynamicTreeSettings(draft=FAR, keep=4), Sampling(temperature=1.3, top_p=0.8)),
    ],
    ids=["chain", "tree"],
)
@pytest.mark.parametrize("ways", [{}, {"merge": True, "extend": True}], ids=["else", "both"])
def test_samples_have_the_targets_joint_distribution(
    otherwise: DrafterSettings, sampling: Sampling, ways: dict[str, bool]
) -> None:
    drafter = HybridSettings(
        lookup=SuffixSettings(per_match=0), otherwise=otherwise, min_match=1, **ways
    )
    assert_exact(drafter, sampling)


def test_what_cannot_be_joined_is_refused() -> None:
    begun = TargetTreeSettings()
    with pytest.raises(ValidationError, match="target_tree begins with the target's tokens"):
        HybridSettings(otherwise=begun)
    with pytest.raises(ValidationError, match="target_tree begins with the target's tokens"):
        BanditSettings(arms=(begun, 2))
    with pytest.raises(ValidationError, match="target_tree begins with the target's tokens"):
        ScheduleSettings(ranges={1: begun, 4: None})
    with pytest.raises(ValidationError, match="a tree of 148 nodes, at most 128"):
        HybridSettings(
            lookup=SuffixSettings(max_tokens=20),
            otherwise=DynamicTreeSettings(keep=128),
            merge=True,
        )
