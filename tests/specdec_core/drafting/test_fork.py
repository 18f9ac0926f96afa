"""Forks: they end when the policy would stop every branch, and tell it what became of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from specdec_core.config import AUTOREGRESSIVE, Configuration, PolicySettings, Sampling
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.heads.card import HeadCard
from specdec_core.drafting.heads.modules import build_head
from specdec_core.drafting.heads.storage import save_head
from specdec_core.drafting.policies.confidence import ConfidenceProductSettings, ConfidenceSettings
from specdec_core.drafting.policies.decision import DecisionSettings
from specdec_core.drafting.policies.dynamic_confidence import DynamicConfidenceSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.heuristic import HeuristicSettings
from specdec_core.drafting.policies.policy import PolicyOutcome
from specdec_core.drafting.policies.pre_cut import PreCutSettings
from specdec_core.drafting.policies.signals import Signals
from specdec_core.drafting.policies.specdecpp import SpecDecPlusPlusSettings
from specdec_core.drafting.policies.svip import SvipSettings
from specdec_core.drafting.tree.settings import ForkSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.sampling import warp
from specdec_core.tokens.token_tree import ROOT, TokenTree

PROMPTS = [tuple(range(5, 5 + n)) for n in (3, 9, 17, 30, 1)]
POLICIES: dict[str, PolicySettings] = {
    "fixed": FixedSettings(max_tokens=5),
    "heuristic": HeuristicSettings(start=2, max_tokens=8),
    "confidence": ConfidenceSettings(threshold=0.08, max_tokens=8),
    "svip": SvipSettings(threshold=2.25, max_tokens=8),
    "product": ConfidenceProductSettings(threshold=0.01, max_tokens=8),
    "dynamic-confidence": DynamicConfidenceSettings(start=0.05, max_tokens=8),
    "pre-cut": PreCutSettings(max_tokens=8, target_cost=5),
    "specdecpp": SpecDecPlusPlusSettings(head="specdecpp", threshold=0.6, max_tokens=8),
    "t1": DecisionSettings(head="t1", threshold=0.5, max_tokens=8),
    "t2": DecisionSettings(head="t2", threshold=0.5, cumulative=True, max_tokens=8),
    "joint": DecisionSettings(head="joint", threshold=0.5, max_tokens=8),
}


def requests(new_tokens: int = 24) -> list[Request]:
    return [Request(str(i), p, new_tokens, seed=i, ignore_eos=True) for i, p in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def heads(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of all kinds with random weights."""
    root = tmp_path_factory.mktemp("heads")
    hidden, own = tiny_pair.drafts["draft"].config.hidden_size, tiny_pair.fingerprints
    for kind in ("specdecpp", "t1", "t2", "joint"):
        card = HeadCard(
            kind=kind, draft="draft", depth=1, width=8, hidden_size=hidden, top_k=10, w_acc=1,
            w_rej=1, sampling=Sampling(), pair={"target": own["target"], "draft": own["draft"]},
        )  # fmt: skip
        torch.manual_seed(0)
        save_head(build_head(kind, hidden, 10, depth=1, width=8), card, root / kind)
    return root


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest, heads: Path) -> PolicySettings:
    policy = POLICIES[request.param]
    if not hasattr(policy, "head"):
        return policy
    return policy.model_copy(update={"head": str(heads / policy.head)})


@pytest.fixture
def endless(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """The pair without a token that ends texts: chains would end behind it, forks do not."""
    monkeypatch.setattr(tiny_pair.target.generation_config, "eos_token_id", -1)
    return tiny_pair


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9)], ids=["greedy", "T"])
def test_a_fork_of_width_one_is_the_chain(
    endless: Pair, policy: PolicySettings, sampling: Sampling
) -> None:
    outcomes = []
    for drafter in (DraftModelSettings(policy=policy), ForkSettings(width=1, policy=policy)):
        configuration = Configuration(drafter=drafter, sampling=sampling)
        generations = Engine(endless, configuration, 1).generate(requests())
        outcomes.append(
            [(g.tokens, [(r.drafted, r.accepted) for r in g.rounds]) for g in generations]
        )
    assert outcomes[0] == outcomes[1]


def test_greedy_output_is_that_of_autoregressive_decoding(
    tiny_pair: Pair, policy: PolicySettings
) -> None:
    expected = [g.tokens for g in Engine(tiny_pair, AUTOREGRESSIVE).generate(requests())]
    configuration = Configuration(drafter=ForkSettings(width=3, policy=policy))
    for slots in (1, 3):
        generations = Engine(tiny_pair, configuration, slots).generate(requests())
        assert [g.tokens for g in generations] == expected
    assert max(r.accepted for g in generations for r in g.rounds) > 1


def branches(tree: TokenTree, width: int) -> list[list[int]]:
    """The nodes of each branch."""
    assert tree.parents == [ROOT if n < width else n - width for n in range(len(tree))]
    return [list(range(branch, len(tree), width)) for branch in range(width)]


@torch.inference_mode()
def confidences(model: torch.nn.Module, text: list[int], sampling: Sampling) -> list[float]:
    logits = model(torch.tensor([text])).logits[0]
    probs = logits.softmax(dim=-1) if sampling.greedy else warp(logits, sampling)
    return probs.amax(dim=-1).tolist()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9)], ids=["greedy", "T"])
def test_a_fork_ends_when_all_its_branches_are_below_the_threshold(
    tiny_pair: Pair, sampling: Sampling
) -> None:
    """The rule of improved MCSD, §3.3, worked out again with a plain model."""
    threshold, most, width = 0.11, 7, 3
    drafter = ForkSettings(
        width=width, policy=ConfidenceSettings(threshold=threshold, max_tokens=most)
    )
    engine = Engine(tiny_pair, Configuration(drafter=drafter, sampling=sampling), 3)
    for request in requests(90):
        engine.add(request)
    draft, lengths, disagreed = tiny_pair.drafts["draft"], [], 0
    propose = engine.drafter.propose

    def watched(sequences: list) -> list[TokenTree]:
        nonlocal disagreed
        trees = propose(sequences)
        for sequence, tree in zip(sequences, trees, strict=True):
            if not sequence.room:
                continue
            sure = []
            for nodes in branches(tree, width):
                text = sequence.tokens + [tree.tokens[node] for node in nodes]
                found = confidences(draft, text, sampling)[len(sequence.tokens) - 1 : -1]
                sure.append([c >= threshold for c in found])
            levels = list(zip(*sure, strict=True))
            stop = next((n for n, level in enumerate(levels) if not any(level)), len(levels))
            assert tree.depth == min(stop + 1, most, sequence.room)
            lengths.append(tree.depth)
            disagreed += any(any(level) and not all(level) for level in levels)
        return trees

    engine.drafter.propose = watched
    while not engine.idle:
        engine.step()
    assert len(set(lengths)) > 3, "the policy never stopped anything"
    assert disagreed > 3, "branches always agreed"


class Told:
    """What a fork's policy is asked and told, slot by slot."""

    def __init__(self, fork: object) -> None:
        self.seen: dict[int, list[int]] = {}
        self.told: list[tuple[int, int, int, list[int]]] = []
        policy = fork.policy
        go_on, observe = policy.go_on, policy.observe

        def watched_go_on(signals: Signals) -> Sequence[bool]:
            for slot, token, position in zip(
                signals.slots, signals.tokens, signals.positions, strict=True
            ):
                if position == 1:
                    self.seen[slot] = []
                self.seen[slot].append(token)
            return go_on(signals)

        def watched_observe(slot: int, outcome: PolicyOutcome) -> None:
            assert outcome.draft_calls == outcome.drafted  # a forward a level
            told = slot, outcome.drafted, outcome.accepted, self.seen.get(slot, [])
            self.told.append(told)
            observe(slot, outcome)

        policy.go_on, policy.observe = watched_go_on, watched_observe


def test_a_policy_that_learns_is_told_what_became_of_each_branch(tiny_pair: Pair) -> None:
    policy = DynamicConfidenceSettings(start=0.05, max_tokens=4)
    engine = Engine(tiny_pair, Configuration(drafter=ForkSettings(width=3, policy=policy)), 2)
    told = Told(engine.drafter)
    observe = engine.drafter.observe
    winners = 0

    def watched(sequence: object, outcome: object) -> None:
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
    engine.generate(requests(40))
    assert winners > 0, "the first branch always won"


def test_a_policy_that_follows_rounds_grows_with_the_fork(tiny_pair: Pair) -> None:
    """K follows the accepted path, whichever branch it is in."""
    policy = HeuristicSettings(start=2, max_tokens=8)
    engine = Engine(tiny_pair, Configuration(drafter=ForkSettings(width=3, policy=policy)), 1)
    [generation] = engine.generate(requests(60)[:1])
    length = 2
    for r in generation.rounds[1:-1]:
        assert r.depth == min(length, 60 - r.position - 1)
        length = min(8, length + 2) if r.accepted == r.depth else max(1, length - 1)
    assert len({r.depth for r in generation.rounds}) > 2
