"""Trees that the target begins: lossless with one token to begin with, and not with two."""

from __future__ import annotations

import pytest

from research.drift.drift import goodness_of_fit
from research.drift.toy_pair import FAR, NEAR, exact_distribution, sample_counts, toy_pair
from specdec_core.config import AUTOREGRESSIVE, Configuration, Sampling
from specdec_core.drafting.target_started.settings import TargetTreeSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.statistics import Generation, TokenOrigin

PROMPTS = [tuple(range(5, 5 + n)) for n in (3, 9, 17, 30, 1)]


def generate(
    pair: Pair, branching: tuple[int, ...], slots: int = 1, new_tokens: int = 24, **sampling: object
) -> list[Generation]:
    configuration = Configuration(
        drafter=TargetTreeSettings(branching=branching), sampling=Sampling(**sampling)
    )
    requests = [
        Request(str(i), p, new_tokens, seed=i, ignore_eos=True) for i, p in enumerate(PROMPTS)
    ]
    return Engine(pair, configuration, slots).generate(requests)


@pytest.mark.parametrize("branching", [(1,), (1, 2), (1, 3, 2, 1)])
@pytest.mark.parametrize("slots", [1, 3])
def test_greedy_output_of_width_one_is_the_targets_own(
    tiny_pair: Pair, branching: tuple[int, ...], slots: int
) -> None:
    requests = [Request(str(i), p, 24, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    expected = [g.tokens for g in Engine(tiny_pair, AUTOREGRESSIVE).generate(requests)]
    assert [g.tokens for g in generate(tiny_pair, branching, slots)] == expected


def fit(branching: tuple[int, ...], draft: str, sampling: Sampling, samples: int) -> float:
    pair = toy_pair()
    drafter = TargetTreeSettings(draft=draft, branching=branching)
    configuration = Configuration(drafter=drafter, sampling=sampling)
    assert configuration.lossless == (branching[0] == 1)
    counts = sample_counts(pair, configuration, samples, length=3)
    return goodness_of_fit(counts, exact_distribution(pair, sampling, 3))


SAMPLINGS = {
    "plain": Sampling(temperature=1.0),
    "top-k": Sampling(temperature=0.7, top_k=3),
    "coupled": Sampling(temperature=1.0, coupling="gumbel"),
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_samples_of_width_one_have_the_targets_joint_distribution(sampling: str) -> None:
    assert fit((1, 2, 2), FAR, SAMPLINGS[sampling], 3_000) > 1e-3


@pytest.mark.parametrize("draft", [NEAR, FAR])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_samples_of_width_two_do_not(sampling: str, draft: str) -> None:
    assert fit((2, 2, 2), draft, SAMPLINGS[sampling], 3_000) < 1e-9


def test_greedy_output_of_width_two_leaves_the_targets_own(tiny_pair: Pair) -> None:
    alone, begun = generate(tiny_pair, (1, 2, 1)), generate(tiny_pair, (2, 2, 1))
    assert [g.tokens for g in alone] != [g.tokens for g in begun]


def test_every_round_but_the_first_has_one_token_of_the_targets(tiny_pair: Pair) -> None:
    for generation in generate(tiny_pair, (2, 2, 1), temperature=0.7):
        assert generation.rounds[0].generated == generation.rounds[0].drafted == 0
        assert generation.origins.count(TokenOrigin.TARGET) == len(generation.rounds) - 1
        for round_ in generation.rounds[1:]:
            assert generation.origins[round_.position] == TokenOrigin.TARGET
            assert round_.generated == round_.accepted + 1
            assert round_.drafted <= 2 * 2 + 2 * 2 * 1


def test_it_says_that_it_is_lossy() -> None:
    lossy = Configuration(drafter=TargetTreeSettings(branching=(2, 4)))
    exact = Configuration(drafter=TargetTreeSettings(branching=(1, 4)))
    assert (lossy.lossless, exact.lossless) == (False, True)
    assert "lossy" in lossy.label
    assert "lossy" not in exact.label
    assert lossy.lossy_methods == {"target_tree"}
    assert not exact.lossy_methods


def test_a_token_whose_logit_is_0_may_begin_a_tree() -> None:
    pair, begun = toy_pair(), []
    pair.target.get_output_embeddings().weight.data.zero_()
    engine = Engine(pair, Configuration(drafter=TargetTreeSettings(draft=NEAR, branching=(3, 1))))
    propose = engine.drafter.propose

    def watched(sequences: list) -> list:
        trees = propose(sequences)
        begun.extend(tree.begun for tree in trees)
        return trees

    engine.drafter.propose = watched
    engine.generate([Request("", (1, 2), 8, ignore_eos=True)])
    assert begun[0] == 3
