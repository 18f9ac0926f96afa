"""A cascade writes the draft model's own chain in fewer forwards, and the target's own output."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec_core.config import Configuration, DrafterSettings, PolicySettings, Sampling
from specdec_core.drafting import chain
from specdec_core.drafting.chain import ChainDrafter
from specdec_core.drafting.draft_model.settings import CascadeSettings, DraftModelSettings
from specdec_core.drafting.drafter import Resources, SlotState
from specdec_core.drafting.heads.card import HeadCard
from specdec_core.drafting.heads.modules import build_head
from specdec_core.drafting.heads.storage import save_head
from specdec_core.drafting.policies.confidence import ConfidenceProductSettings
from specdec_core.drafting.policies.dynamic_confidence import DynamicConfidenceSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.heuristic import HeuristicSettings
from specdec_core.drafting.policies.policy import PolicyOutcome
from specdec_core.drafting.policies.pre_cut import PreCutSettings
from specdec_core.drafting.policies.specdecpp import SpecDecPlusPlusSettings
from specdec_core.drafting.policies.svip import SvipSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.drafting.token_cache import TokenCacheSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.sampling import RandomStream, warp
from specdec_core.tokens.statistics import Counts, Generation, TokenOrigin
from specdec_core.tokens.token_tree import ROOT, TokenTree
from tests.specdec_core.drafting.reuse import (
    AnyPossibleGuess,
    fit,
    generate,
    same_as_the_target_alone,
)

GREEDY = Sampling()
COUPLED = Sampling(temperature=1.0, coupling="gumbel")
PROPOSERS = {
    "prompt-lookup": PromptLookupSettings(max_tokens=4),
    "suffix": SuffixSettings(max_tokens=5),
    "token-cache": TokenCacheSettings(phrases=3, phrase_length=4),
}
POLICIES = {
    "fixed": FixedSettings(max_tokens=6),
    "svip": SvipSettings(threshold=2.3),
    "product": ConfidenceProductSettings(threshold=1e-4),
    "heuristic": HeuristicSettings(start=3),
    "dynamic-confidence": DynamicConfidenceSettings(),
}


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("proposer", PROPOSERS.values(), ids=PROPOSERS)
def test_output_is_the_targets_own(
    tiny_pair: Pair, proposer: DrafterSettings, sampling: Sampling
) -> None:
    drafter = CascadeSettings(proposer=proposer, policy=FixedSettings(max_tokens=6))
    assert same_as_the_target_alone(tiny_pair, drafter, sampling)


def rounds(generations: list[Generation]) -> list[tuple[int, int, int]]:
    """What the length policy decided and what became of it."""
    return [(r.position, r.drafted, r.accepted) for g in generations for r in g.rounds]


@pytest.mark.parametrize(
    ("policy", "sampling"),
    [*((policy, GREEDY) for policy in POLICIES.values()), (POLICIES["svip"], COUPLED)],
    ids=[*POLICIES, "coupled"],
)
def test_the_chain_is_the_draft_models_own_and_ends_where_the_policy_says(
    tiny_pair: Pair, policy: PolicySettings, sampling: Sampling
) -> None:
    plain = generate(tiny_pair, DraftModelSettings(policy=policy), 1, sampling)
    guessed = generate(
        tiny_pair, CascadeSettings(policy=policy, proposer=TokenCacheSettings()), 1, sampling
    )
    assert rounds(guessed) == rounds(plain)
    assert Counts.of(guessed).n_draft < Counts.of(plain).n_draft


def test_a_head_reads_each_tokens_own_hidden_state(tiny_pair: Pair, tmp_path: Path) -> None:
    hidden, own = tiny_pair.drafts["draft"].config.hidden_size, tiny_pair.fingerprints
    card = HeadCard(
        kind="specdecpp", draft="draft", depth=1, width=8, hidden_size=hidden, top_k=10, w_acc=1,
        w_rej=1, sampling=GREEDY, pair={"target": own["target"], "draft": own["draft"]},
    )  # fmt: skip
    torch.manual_seed(0)
    save_head(build_head("specdecpp", hidden, 10, depth=1, width=8), card, tmp_path / "head")
    policy = SpecDecPlusPlusSettings(head=str(tmp_path / "head"), threshold=0.8)
    plain = generate(tiny_pair, DraftModelSettings(policy=policy), slots=3)
    guessed = generate(
        tiny_pair, CascadeSettings(policy=policy, proposer=PROPOSERS["token-cache"]), slots=3
    )
    assert rounds(guessed) == rounds(plain)
    assert len({r.drafted for g in plain for r in g.rounds}) > 3
    assert Counts.of(guessed).n_draft < Counts.of(plain).n_draft


@torch.inference_mode()
def test_every_sampled_token_carries_the_draft_models_distribution(tiny_pair: Pair) -> None:
    sampling = Sampling(temperature=0.4, top_k=8)
    drafter = CascadeSettings(proposer=PROPOSERS["token-cache"], policy=FixedSettings(max_tokens=6))
    engine = Engine(tiny_pair, Configuration(drafter=drafter, sampling=sampling), slots=2)
    model, propose, foreseen = tiny_pair.drafts["draft"], engine.drafter.propose, 0

    def check(sequences: list[SlotState]) -> list[TokenTree]:
        nonlocal foreseen
        trees = propose(sequences)
        for sequence, tree in zip(sequences, trees, strict=True):
            foreseen += len(tree) - tree.draft_forwards
            assert tree.is_chain
            if not len(tree):
                continue
            text = torch.tensor([sequence.tokens + tree.tokens])
            expected = warp(model(text).logits[0, len(sequence.tokens) - 1 : -1], sampling)
            torch.testing.assert_close(torch.stack(tree.draft_probs), expected, atol=1e-4, rtol=0)
        return trees

    engine.drafter.propose = check
    prompt = engine.encode("x = 1\ny = 2\nx = 1\ny = 2\n")
    engine.generate([Request(str(i), prompt, 40, seed=i, ignore_eos=True) for i in range(3)])
    assert foreseen > 20


SHORT = CascadeSettings(
    draft="near",
    proposer=TokenCacheSettings(phrases=3, phrase_length=2, memory="all"),
    policy=FixedSettings(max_tokens=3),
)


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [
        (SHORT, Sampling(temperature=1.0)),
        (SHORT, Sampling(temperature=0.7, top_k=3)),
        (
            CascadeSettings(draft="far", policy=SvipSettings(threshold=1.2, max_tokens=3)),
            Sampling(temperature=1.3, top_p=0.8),
        ),
    ],
    ids=["temperature", "top-k", "prompt-lookup-svip-top-p"],
)
def test_samples_have_the_targets_joint_distribution(
    drafter: CascadeSettings, sampling: Sampling
) -> None:
    assert fit(drafter, sampling) > 1e-3


def test_the_fit_notices_chains_that_were_not_drawn_from_the_distribution_they_carry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chain, "rule_of", lambda sampling: AnyPossibleGuess())
    assert fit(SHORT, Sampling(temperature=1.0)) < 1e-9


class Foreseeing(ChainDrafter):
    """Guesses what it is told."""

    told: dict[int, list[int]]

    def guess(self, sequence: SlotState, drafted: list[int], room: int) -> TokenTree:
        tree = TokenTree()
        tree.graft(ROOT, [5], TokenOrigin.CACHE)
        tree.graft(ROOT, self.told[sequence.slot][len(drafted) :][:room], TokenOrigin.CACHE)
        return tree


@torch.inference_mode()
def test_a_perfect_guess_takes_one_forward_and_leaves_the_cache_in_step(tiny_pair: Pair) -> None:
    policy = FixedSettings(max_tokens=7)
    engine = Engine(tiny_pair, Configuration(drafter=DraftModelSettings(policy=policy)), slots=2)
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
    drafter = Foreseeing(DraftModelSettings(policy=policy), resources)
    drafter.told = {slot: tree.tokens for slot, tree in enumerate(plain)}
    drafter.open(sequences)
    trees = drafter.propose(sequences)
    assert [tree.tokens for tree in trees] == [tree.tokens for tree in plain]
    assert [tree.draft_forwards for tree in trees] == [1, 1]
    assert runner.lengths == [4 + 6, 2 + 6]


@torch.inference_mode()
def test_pre_cut_pays_for_forwards_not_for_candidates(tiny_pair: Pair) -> None:
    """Eight candidates that one forward brings are one decision, at the cost of one call."""
    runner = tiny_pair.open_runner("draft", 1)
    sequence = SlotState(0, [9, 8, 7, 6], GREEDY, RandomStream(0, 320), room=8)
    resources = Resources(lambda name: runner, print, 320, frozenset())
    plain = Engine(
        tiny_pair,
        Configuration(drafter=DraftModelSettings(policy=FixedSettings(max_tokens=8))),
    ).drafter.propose([sequence])[0]
    policy = PreCutSettings(max_tokens=8, exploration=0.0, target_cost=4)
    drafter = Foreseeing(DraftModelSettings(policy=policy), resources)
    drafter.told = {0: plain.tokens}
    drafter.open([sequence])
    [tree] = drafter.propose([sequence])
    assert (tree.tokens, tree.draft_forwards) == (plain.tokens, 1)
    drafter.policy.observe(0, PolicyOutcome(8, 8, 1))
    table = drafter.policy.table
    [state] = [state for state, trials in enumerate(table.stopped) if trials]
    assert state < policy.bins  # cost 1
    assert table.stop[state] == pytest.approx(9 / 5 - 1)
