"""Forks that the target begins, as deep as a policy lets them be: lossless with one token to begin
with, and not with two."""

from __future__ import annotations

import pytest

from research.drift.drift import goodness_of_fit
from research.drift.toy_pair import FAR, NEAR, exact_distribution, sample_counts, toy_pair
from specdec_core.config import AUTOREGRESSIVE, Configuration, PolicySettings, Sampling
from specdec_core.drafting.policies.confidence import ConfidenceSettings
from specdec_core.drafting.policies.dynamic_confidence import DynamicConfidenceSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.pre_cut import PreCutSettings
from specdec_core.drafting.target_started.settings import TargetForkSettings, TargetTreeSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.statistics import Generation
from specdec_core.tokens.token_tree import ROOT

PROMPTS = [tuple(range(5, 5 + n)) for n in (3, 9, 17, 30, 1)]
STOPS = ConfidenceSettings(threshold=0.3, max_tokens=3)  # within the toy pair's range
LEARNS = PreCutSettings(max_tokens=3, target_cost=2)
PLAIN = Sampling(temperature=1.0)
TOP = Sampling(temperature=0.7, top_k=3)


def generate(pair: Pair, settings: object, slots: int = 1, **sampling: object) -> list[Generation]:
    configuration = Configuration(drafter=settings, sampling=Sampling(**sampling))
    requests = [Request(str(i), p, 24, seed=i, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    return Engine(pair, configuration, slots).generate(requests)


@pytest.mark.parametrize(
    "policy",
    [FixedSettings(max_tokens=4), ConfidenceSettings(threshold=0.08), LEARNS],
    ids=["fixed", "confidence", "learning"],
)
@pytest.mark.parametrize(("spread", "slots"), [(1, 1), (3, 3)])
def test_greedy_output_of_width_one_is_the_targets_own(
    tiny_pair: Pair, policy: PolicySettings, spread: int, slots: int
) -> None:
    requests = [Request(str(i), p, 24, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    expected = [g.tokens for g in Engine(tiny_pair, AUTOREGRESSIVE).generate(requests)]
    settings = TargetForkSettings(width=1, spread=spread, policy=policy)
    generations = generate(tiny_pair, settings, slots)
    assert [g.tokens for g in generations] == expected
    assert max(r.accepted for g in generations for r in g.rounds) > 1


def fit(
    width: int, spread: int, draft: str, sampling: Sampling, policy: PolicySettings = STOPS
) -> float:
    settings = TargetForkSettings(draft=draft, width=width, spread=spread, policy=policy)
    configuration = Configuration(drafter=settings, sampling=sampling)
    assert configuration.lossless == (width == 1)
    counts = sample_counts(toy_pair(), configuration, 1_500, length=3)
    return goodness_of_fit(counts, exact_distribution(toy_pair(), sampling, 3))


@pytest.mark.parametrize(
    ("spread", "draft", "sampling", "policy"),
    [(2, FAR, PLAIN, STOPS), (1, NEAR, TOP, LEARNS)],
    ids=["plain", "learning, top-k"],
)
def test_samples_of_width_one_have_the_targets_joint_distribution(
    spread: int, draft: str, sampling: Sampling, policy: PolicySettings
) -> None:
    assert fit(1, spread, draft, sampling, policy) > 1e-3


def test_samples_of_width_two_do_not() -> None:
    assert fit(2, 2, FAR, PLAIN) < 1e-6


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9}], ids=["greedy", "T"])
def test_of_a_fixed_depth_it_is_the_static_tree(tiny_pair: Pair, sampling: dict) -> None:
    forked = TargetForkSettings(width=2, spread=2, policy=FixedSettings(max_tokens=3))
    static = TargetTreeSettings(branching=(2, 2, 1, 1))
    outcomes = [
        [
            (g.tokens, [(r.drafted, r.accepted) for r in g.rounds])
            for g in generate(tiny_pair, s, 2, **sampling)
        ]
        for s in (forked, static)
    ]
    assert outcomes[0] == outcomes[1]


def test_it_ends_when_the_policy_would_stop_every_branch(tiny_pair: Pair) -> None:
    threshold = 0.08
    policy = ConfidenceSettings(threshold=threshold, max_tokens=6)
    settings = TargetForkSettings(width=3, spread=2, policy=policy, replacement=True)
    engine = Engine(tiny_pair, Configuration(drafter=settings, sampling=Sampling(temperature=1.0)))
    propose, grown = engine.drafter.propose, []

    def watched(sequences: list) -> list:
        trees = propose(sequences)
        grown.extend((tree, s.room) for tree, s in zip(trees, sequences, strict=True) if len(tree))
        return trees

    engine.drafter.propose = watched
    engine.generate([Request("", PROMPTS[1], 40, seed=3, ignore_eos=True)])
    depths = set()
    for tree, room in grown:
        assert tree.parents.count(ROOT) == 3
        depth = [len(tree.path(n)) for n in range(len(tree))]
        depths.add(tree.depth)
        drafted = [n for n in range(len(tree)) if tree.parents[n] != ROOT]
        confidence = {n: float(tree.draft_probs[n].max()) for n in drafted}
        for level in range(2, tree.depth + 1):
            goes_on = max(confidence[n] for n in drafted if depth[n] == level) >= threshold
            ends = level == tree.depth
            assert goes_on != ends or level - 1 == min(6, room)
    assert len(depths) > 1


def test_a_policy_that_learns_is_told_what_became_of_each_branch(tiny_pair: Pair) -> None:
    policy = DynamicConfidenceSettings(start=0.05, max_tokens=3)
    settings = TargetForkSettings(width=3, policy=policy)
    engine = Engine(tiny_pair, Configuration(drafter=settings))
    observe, told = engine.drafter.policy.observe, []

    def watched(slot: int, outcome: object) -> None:
        told.append((slot, outcome.drafted, outcome.accepted))
        observe(slot, outcome)

    engine.drafter.policy.observe = watched
    [generation] = engine.generate([Request("", PROMPTS[2], 24, ignore_eos=True)])
    drafting = [r for r in generation.rounds[:-1] if r.drafted]
    assert len(told) == 3 * len(drafting)
    for number, round_ in enumerate(drafting):
        branches = told[3 * number : 3 * number + 3]
        assert {slot for slot, _, _ in branches} == {0, 1, 2}
        assert {3 * drafted for _, drafted, _ in branches} == {round_.drafted}
        # The token that the target drew is in the path and not a candidate of a branch.
        assert sum(accepted for _, _, accepted in branches) == round_.accepted
