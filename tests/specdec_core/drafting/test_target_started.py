"""Trees and forks that the target begins: what they hold, and that they say that they are lossy."""

import pytest

from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.target_started.settings import TargetForkSettings, TargetTreeSettings
from specdec_core.engine import Engine, Request
from specdec_core.tokens.statistics import TokenOrigin
from specdec_core.tokens.token_tree import ROOT
from tests.specdec_core.drafting.proofs import COUNTING, proposals, requests
from tests.specdec_core.kinds import configured, policy
from tests.toy_pair import NEAR, toy_pair


def generate(pair, settings, slots=1, **sampling):
    engine = Engine(pair, configured(settings, Sampling(**sampling)), slots)
    return engine.generate(requests(24, COUNTING))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9}], ids=["greedy", "T"])
def test_of_a_fixed_depth_it_is_the_static_tree(tiny_pair, sampling):
    forked = TargetForkSettings(width=2, spread=2, policy=policy("fixed", max_tokens=3))
    static = TargetTreeSettings(branching=(2, 2, 1, 1))
    outcomes = [
        [
            (g.tokens, [(r.drafted, r.accepted) for r in g.rounds])
            for g in generate(tiny_pair, s, 2, **sampling)
        ]
        for s in (forked, static)
    ]
    assert outcomes[0] == outcomes[1]


def test_a_policy_that_learns_is_told_what_became_of_each_branch(tiny_pair):
    learns = policy("pre_cut", max_tokens=3)
    settings = TargetForkSettings(width=3, policy=learns)
    engine = Engine(tiny_pair, configured(settings))
    observe, told = engine.drafter.policy.observe, []

    def watched(slot, outcome):
        told.append((slot, outcome.drafted, outcome.accepted))
        observe(slot, outcome)

    engine.drafter.policy.observe = watched
    [generation] = engine.generate([Request("", COUNTING[2], 24, ignore_eos=True)])
    drafting = [r for r in generation.rounds[:-1] if r.drafted]
    assert len(told) == 3 * len(drafting)
    for number, round_ in enumerate(drafting):
        branches = told[3 * number : 3 * number + 3]
        assert {slot for slot, _, _ in branches} == {0, 1, 2}
        assert {3 * drafted for _, drafted, _ in branches} == {round_.drafted}
        # The token that the target drew is in the path and not a candidate of a branch.
        assert sum(accepted for _, _, accepted in branches) == round_.accepted


def test_every_round_but_the_first_has_one_token_of_the_targets(tiny_pair):
    for generation in generate(tiny_pair, TargetTreeSettings(branching=(2, 2, 1)), temperature=0.7):
        assert generation.rounds[0].generated == generation.rounds[0].drafted == 0
        assert generation.origins.count(TokenOrigin.TARGET) == len(generation.rounds) - 1
        for round_ in generation.rounds[1:]:
            assert generation.origins[round_.position] == TokenOrigin.TARGET
            assert round_.generated == round_.accepted + 1
            assert round_.drafted <= 2 * 2 + 2 * 2 * 1


def test_it_says_that_it_is_lossy():
    lossy = Configuration(drafter=TargetTreeSettings(branching=(2, 4)))
    exact = Configuration(drafter=TargetTreeSettings(branching=(1, 4)))
    assert (lossy.lossless, exact.lossless) == (False, True)
    assert "lossy" in lossy.label
    assert "lossy" not in exact.label
    assert lossy.lossy_methods == {"target_tree"}
    assert not exact.lossy_methods


def test_a_token_whose_logit_is_0_may_begin_a_tree():
    pair = toy_pair()
    pair.target.get_output_embeddings().weight.data.zero_()
    engine = Engine(pair, configured(TargetTreeSettings(draft=NEAR, branching=(3, 1))))
    seen = proposals(engine.drafter)
    engine.generate([Request("", (1, 2), 8, ignore_eos=True)])
    assert seen[0].tree.begun == 3


def test_it_ends_when_the_policy_would_stop_every_branch(tiny_pair):
    threshold = 0.08
    stops = policy("confidence", threshold=threshold, max_tokens=6)
    settings = TargetForkSettings(width=3, spread=2, policy=stops, replacement=True)
    engine = Engine(tiny_pair, configured(settings, Sampling(temperature=1.0)))
    seen, depths = proposals(engine.drafter), set()
    engine.generate([Request("", COUNTING[1], 40, seed=3, ignore_eos=True)])
    for _, room, _, tree in seen:
        if not len(tree):
            continue
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
