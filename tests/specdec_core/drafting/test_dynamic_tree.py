"""Dynamic trees: what is expanded and kept, and that the output stays the target's."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from research.drift.drift import goodness_of_fit
from research.drift.toy_pair import FAR, NEAR, exact_distribution, sample_counts, toy_pair
from specdec_core.config import AUTOREGRESSIVE, Configuration, PolicySettings, Sampling
from specdec_core.drafting.dynamic_tree.drafter import rerank
from specdec_core.drafting.dynamic_tree.settings import DynamicTreeSettings
from specdec_core.drafting.heads.card import HeadCard
from specdec_core.drafting.heads.modules import build_head
from specdec_core.drafting.heads.storage import save_head
from specdec_core.drafting.policies.confidence import ConfidenceProductSettings, ConfidenceSettings
from specdec_core.drafting.policies.dynamic_confidence import DynamicConfidenceSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.heuristic import HeuristicSettings
from specdec_core.drafting.policies.pre_cut import PreCutSettings
from specdec_core.drafting.policies.specdecpp import SpecDecPlusPlusSettings
from specdec_core.drafting.policies.svip import SvipSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.token_tree import ROOT, TokenTree
from tests.specdec_core.fits import alike_behind_the_first

PROMPTS = [tuple(range(5, 5 + n)) for n in (3, 9, 17, 30, 1)]
POLICIES = {
    "fixed": FixedSettings(max_tokens=5),
    "svip": SvipSettings(threshold=2.25, max_tokens=6),
    "product": ConfidenceProductSettings(threshold=0.002, max_tokens=6),
    "heuristic": HeuristicSettings(start=2, max_tokens=6),
    "dynamic-confidence": DynamicConfidenceSettings(start=0.05, max_tokens=6),
    "pre-cut": PreCutSettings(max_tokens=6, target_cost=5),
    "specdecpp": SpecDecPlusPlusSettings(head="", threshold=0.6, max_tokens=6),
}


def requests(new_tokens: int = 24) -> list[Request]:
    return [Request(str(i), p, new_tokens, seed=i) for i, p in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def head(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An acceptance head with random weights."""
    folder = tmp_path_factory.mktemp("heads") / "random"
    hidden, own = tiny_pair.drafts["draft"].config.hidden_size, tiny_pair.fingerprints
    card = HeadCard(
        kind="specdecpp", draft="draft", depth=1, width=8, hidden_size=hidden, top_k=10, w_acc=1,
        w_rej=1, sampling=Sampling(), pair={"target": own["target"], "draft": own["draft"]},
    )  # fmt: skip
    torch.manual_seed(0)
    save_head(build_head("specdecpp", hidden, 10, depth=1, width=8), card, folder)
    return folder


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest, head: Path) -> PolicySettings:
    policy = POLICIES[request.param]
    return policy.model_copy(update={"head": str(head)}) if hasattr(policy, "head") else policy


def test_greedy_output_is_the_targets_own(tiny_pair: Pair, policy: PolicySettings) -> None:
    drafter = DynamicTreeSettings(expand=3, children=3, keep=10, policy=policy)
    expected = [g.tokens for g in Engine(tiny_pair, AUTOREGRESSIVE).generate(requests())]
    for slots in (1, 3):
        engine = Engine(tiny_pair, Configuration(drafter=drafter), slots)
        assert [g.tokens for g in engine.generate(requests())] == expected


def test_candidates_beside_the_most_likely_are_accepted(tiny_pair: Pair) -> None:
    def mat(children: int) -> float:
        drafter = DynamicTreeSettings(expand=children, children=children, keep=24)
        generations = Engine(tiny_pair, Configuration(drafter=drafter), 5).generate(requests(48))
        return sum(len(g.tokens) for g in generations) / sum(len(g.rounds) for g in generations)

    assert mat(4) > mat(1)


@pytest.mark.parametrize(
    ("draft", "policy", "sampling"),
    [
        (NEAR, FixedSettings(max_tokens=3), Sampling(temperature=1.0)),
        (FAR, SvipSettings(threshold=1.1, max_tokens=3), Sampling(temperature=1.0)),
        (
            FAR,
            ConfidenceSettings(threshold=0.35, max_tokens=3),
            Sampling(temperature=1.3, top_p=0.8),
        ),
        (NEAR, PreCutSettings(max_tokens=3, target_cost=5), Sampling(temperature=0.7, top_k=3)),
        (NEAR, SvipSettings(threshold=1.2, max_tokens=3), Sampling(temperature=0.8)),
        (FAR, FixedSettings(max_tokens=2), Sampling(temperature=1.0, coupling="gumbel")),
    ],
    ids=["fixed", "svip", "top-p", "top-k", "least", "coupled"],
)
def test_samples_have_the_targets_joint_distribution(
    draft: str, policy: PolicySettings, sampling: Sampling
) -> None:
    pair = toy_pair()
    drafter = DynamicTreeSettings(
        draft=draft,
        expand=2,
        children=2,
        keep=5,
        least=0.1 if sampling.temperature == 0.8 else 0.0,
        policy=policy,
    )
    configuration = Configuration(drafter=drafter, sampling=sampling)
    counts = sample_counts(pair, configuration, 4_000, length=4)
    expected = exact_distribution(pair, sampling, 4)
    assert goodness_of_fit(*alike_behind_the_first(counts, expected)) > 1e-3


def proposed(pair: Pair, configuration: Configuration, slots: int) -> list[tuple[tuple, TokenTree]]:
    """Every tree that was proposed, and the text it was proposed for."""
    engine, seen = Engine(pair, configuration, slots), []
    propose = engine.drafter.propose

    def record(sequences: list) -> list[TokenTree]:
        trees = propose(sequences)
        seen.extend(((tuple(s.tokens), s.room), t) for s, t in zip(sequences, trees, strict=True))
        return trees

    engine.drafter.propose = record
    engine.generate(requests())
    return seen


@torch.inference_mode()
def grown_plainly(
    model: torch.nn.Module, text: tuple[int, ...], drafter: DynamicTreeSettings, levels: int
) -> set[tuple[int, ...]]:
    """The paths of the tree, expanded and reranked without a cache, for policy SVIP or fixed."""
    confidence: dict[tuple[int, ...], float] = {(): 1.0}
    frontier = [()]
    for _ in range(levels):
        found = {}
        for path in frontier:
            logits = model(torch.tensor([[*text, *path]])).logits[0, -1]
            q = logits.float().softmax(-1)
            entropy = -(q * q.log()).sum().item()
            for p, token in zip(*(x.tolist() for x in q.topk(drafter.children)), strict=True):
                found[(*path, token)] = confidence[path] * p, entropy
        confidence |= {path: p for path, (p, _) in found.items()}
        ranked = sorted((p for p in found if p[-1] != 0), key=lambda p: -found[p][0])
        ranked = [p for p in ranked if found[p][0] >= drafter.least]
        frontier = ranked[: drafter.expand]
        if isinstance(drafter.policy, SvipSettings):
            frontier = [p for p in frontier if math.sqrt(found[p][1]) <= drafter.policy.threshold]
        if not frontier:
            break
    del confidence[()]
    confidence = {path: p for path, p in confidence.items() if p >= drafter.least}
    return set(sorted(confidence, key=lambda p: -confidence[p])[: drafter.keep])


@pytest.mark.parametrize(("policy", "least"), [("fixed", 0.0), ("fixed", 0.002), ("svip", 0.0)])
@pytest.mark.parametrize("slots", [1, 3])
def test_trees_are_those_of_a_plain_expansion(
    tiny_pair: Pair, policy: str, least: float, slots: int
) -> None:
    drafter = DynamicTreeSettings(
        expand=2, children=3, keep=12, least=least, policy=POLICIES[policy]
    )
    seen = proposed(tiny_pair, Configuration(drafter=drafter), slots)
    model, shapes = tiny_pair.drafts["draft"], set()
    for (text, room), tree in seen[::5]:
        levels = min(room, drafter.policy.max_tokens)
        paths = grown_plainly(model, text, drafter, levels)
        assert set(paths_of(tree)) == paths
        shapes.add(tuple(tree.parents))
    assert len(shapes) > 2


def paths_of(tree: TokenTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((token,) if parent == ROOT else (*paths[parent], token))
    return paths


def test_room_and_nodes_are_kept_to(tiny_pair: Pair) -> None:
    drafter = DynamicTreeSettings(expand=4, children=4, keep=9)
    for (_, room), tree in proposed(tiny_pair, Configuration(drafter=drafter), 2):
        assert tree.depth <= min(room, 6)
        assert len(tree) <= 9
        assert tree.draft_tokens <= 1 + 4 * (tree.draft_forwards - 1) or not len(tree)


@st.composite
def scored_trees(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    """Parents, and log confidences that fall along every path or stay."""
    parents: list[int] = []
    scores: list[float] = []
    for node in range(draw(st.integers(0, 40))):
        parent = draw(st.integers(ROOT, node - 1))
        step = draw(st.sampled_from([0.0, 0.0, -0.1, -0.5]) | st.floats(-20, 0))
        parents.append(parent)
        scores.append((0.0 if parent == ROOT else scores[parent]) + step)
    return parents, scores


@given(scored_trees(), st.integers(1, 45), st.sampled_from([-math.inf, -5.0, -0.3, 0.0]))
def test_what_is_kept_is_connected_most_confident_and_within_the_limit(
    tree: tuple[list[int], list[float]], limit: int, least: float
) -> None:
    parents, scores = tree
    kept = rerank(scores, limit, least)
    assert kept == sorted(set(kept))
    assert len(kept) == min(limit, sum(score >= least for score in scores))
    assert all(parents[node] in (ROOT, *kept) for node in kept)
    dropped = set(range(len(scores))) - set(kept)
    if dropped and kept:
        assert min(scores[n] for n in kept) >= max(scores[n] for n in dropped)


def test_more_nodes_than_the_caches_hold_are_refused() -> None:
    with pytest.raises(ValidationError, match="expands 152 nodes"):
        DynamicTreeSettings(expand=8, policy=SvipSettings(max_tokens=20))
    with pytest.raises(ValidationError, match="128"):
        DynamicTreeSettings(keep=129)
