"""Dynamic trees: what is expanded and kept, and that the output stays the target's."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.drafting.dynamic_tree.drafter import rerank
from specdec_core.drafting.dynamic_tree.settings import DynamicTreeSettings
from specdec_core.drafting.policies.confidence import SvipSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.tokens.token_tree import ROOT
from tests.specdec_core.drafting.proofs import paths, proposed

FIXED, SVIP = FixedSettings(max_tokens=5), SvipSettings(threshold=2.25, max_tokens=6)


@torch.inference_mode()
def grown_plainly(model, text, drafter, levels):
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


@pytest.mark.parametrize(("policy", "least"), [(FIXED, 0.002), (SVIP, 0.0)])
def test_trees_are_those_of_a_plain_expansion(tiny_pair, policy, least):
    drafter = DynamicTreeSettings(expand=2, children=3, keep=12, least=least, policy=policy)
    seen = proposed(tiny_pair, drafter)
    model, shapes = tiny_pair.drafts["draft"], set()
    for text, room, _, tree in seen[::5]:
        levels = min(room, drafter.policy.max_tokens)
        expected = grown_plainly(model, text, drafter, levels)
        assert set(paths(tree)) == expected
        shapes.add(tuple(tree.parents))
    assert len(shapes) > 2


@st.composite
def scored_trees(draw):
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
def test_what_is_kept_is_connected_most_confident_and_within_the_limit(tree, limit, least):
    parents, scores = tree
    kept = rerank(scores, limit, least)
    assert kept == sorted(set(kept))
    assert len(kept) == min(limit, sum(score >= least for score in scores))
    assert all(parents[node] in (ROOT, *kept) for node in kept)
    dropped = set(range(len(scores))) - set(kept)
    if dropped and kept:
        assert min(scores[n] for n in kept) >= max(scores[n] for n in dropped)
