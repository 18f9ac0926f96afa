"""Forks: they end when the policy would stop every branch, and tell it what became of each."""

import pytest
import torch

from specdec_core.config import Sampling
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.tree.settings import ForkSettings, TreeSettings
from specdec_core.engine import Engine
from specdec_core.tokens.sampling import warp
from specdec_core.tokens.token_tree import ROOT
from tests.conftest import save_random_head
from tests.specdec_core.drafting.proofs import COUNTING, proposals, requests
from tests.specdec_core.kinds import configured, policy

GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.9)
FEW = Sampling(temperature=0.9, top_k=2)
# Policies that differ in their inputs.
POLICIES = {
    "fixed": policy("fixed", max_tokens=4),
    "heuristic": policy("heuristic", start=2, max_tokens=8),
    "product": policy("confidence_product", threshold=0.01, max_tokens=8),
    "pre-cut": policy("pre_cut", max_tokens=8),
    "joint": policy("decision", head="joint", threshold=0.5, cumulative=True, max_tokens=8),
}


@pytest.fixture
def endless(tiny_pair, monkeypatch):
    """The pair without a token that ends texts: chains would end behind it, forks do not."""
    monkeypatch.setattr(tiny_pair.target.generation_config, "eos_token_id", -1)
    return tiny_pair


@pytest.mark.parametrize(
    ("name", "sampling"),
    [*((name, GREEDY) for name in POLICIES), ("product", SAMPLED), ("fixed", FEW)],
)
def test_a_fork_and_a_tree_of_width_one_are_the_chain(
    endless, name, sampling, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    save_random_head(endless, "joint", tmp_path / "heads" / "joint")
    policy, outcomes = POLICIES[name], []
    drafters = [DraftModelSettings(policy=policy), ForkSettings(width=1, policy=policy)]
    if name == "fixed":
        drafters.append(TreeSettings(branching=(1, 1, 1, 1)))
    for drafter in drafters:
        engine = Engine(endless, configured(drafter, sampling))
        generations = engine.generate(requests(24, COUNTING))
        outcomes.append(
            [(g.tokens, [(r.drafted, r.accepted) for r in g.rounds]) for g in generations]
        )
    assert all(outcome == outcomes[0] for outcome in outcomes)


def branches(tree, width):
    """The nodes of each branch."""
    assert tree.parents == [ROOT if n < width else n - width for n in range(len(tree))]
    return [list(range(branch, len(tree), width)) for branch in range(width)]


@torch.inference_mode()
def confidences(model, text, sampling):
    logits = model(torch.tensor([text])).logits[0]
    probs = logits.softmax(dim=-1) if sampling.greedy else warp(logits, sampling)
    return probs.amax(dim=-1).tolist()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "T"])
def test_a_fork_ends_when_all_its_branches_are_below_the_threshold(tiny_pair, sampling):
    """The rule of improved MCSD, §3.3, worked out again with a plain model."""
    threshold, most, width = 0.11, 7, 3
    stops = policy("confidence", threshold=threshold, max_tokens=most)
    engine = Engine(tiny_pair, configured(ForkSettings(width=width, policy=stops), sampling), 3)
    seen = proposals(engine.drafter)
    engine.generate(requests(90, COUNTING))
    draft, lengths, disagreed = tiny_pair.drafts["draft"], [], 0
    for text, room, _, tree in seen:
        if not room:
            continue
        sure = []
        for nodes in branches(tree, width):
            whole = text + [tree.tokens[node] for node in nodes]
            found = confidences(draft, whole, sampling)[len(text) - 1 : -1]
            sure.append([c >= threshold for c in found])
        levels = list(zip(*sure, strict=True))
        stop = next((n for n, level in enumerate(levels) if not any(level)), len(levels))
        assert tree.depth == min(stop + 1, most, room)
        lengths.append(tree.depth)
        disagreed += any(any(level) and not all(level) for level in levels)
    assert len(set(lengths)) > 3, "the policy never stopped anything"
    assert disagreed > 3, "branches always agreed"


class Told:
    """The calls of a fork's policy, slot by slot."""

    def __init__(self, fork):
        self.seen: dict[int, list[int]] = {}
        self.told: list[tuple[int, int, int, list[int]]] = []
        policy = fork.policy
        go_on, observe = policy.go_on, policy.observe

        def watched_go_on(signals):
            for slot, token, position in zip(
                signals.slots, signals.tokens, signals.positions, strict=True
            ):
                if position == 1:
                    self.seen[slot] = []
                self.seen[slot].append(token)
            return go_on(signals)

        def watched_observe(slot, outcome):
            assert outcome.draft_calls == outcome.drafted  # a forward a level
            told = slot, outcome.drafted, outcome.accepted, self.seen.get(slot, [])
            self.told.append(told)
            observe(slot, outcome)

        policy.go_on, policy.observe = watched_go_on, watched_observe


def test_a_policy_that_learns_is_told_what_became_of_each_branch(tiny_pair):
    learns = policy("pre_cut", max_tokens=4)
    engine = Engine(tiny_pair, configured(ForkSettings(width=3, policy=learns)), 2)
    told = Told(engine.drafter)
    observe = engine.drafter.observe
    winners = 0

    def watched(sequence, outcome):
        nonlocal winners
        told.told.clear()
        observe(sequence, outcome)
        tree = outcome.tree
        slots = range(3 * sequence.slot, 3 * sequence.slot + 3)
        expected = []
        for slot, nodes in zip(slots, branches(tree, 3), strict=True):
            accepted = sum(node in outcome.path for node in nodes)
            expected.append((slot, tree.depth, accepted, [tree.tokens[n] for n in nodes]))
            winners += 0 < accepted == outcome.accepted and slot % 3 > 0
        assert told.told == expected

    engine.drafter.observe = watched
    engine.generate(requests(40, COUNTING))
    assert winners > 0, "the first branch always won"
