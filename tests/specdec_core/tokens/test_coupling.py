"""Coupled sampling: the target's distribution, an output that no draft changes, and the acceptance
that the formula says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.svip import SvipSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens import coupling
from specdec_core.tokens.coupling import SharedNoise, acceptance, race
from tests.specdec_core.tokens.test_lossless import engine_counts, joint, p_value, toy_pair

__all__ = ["toy_pair"]

COUPLED = Sampling(temperature=1.0, coupling="gumbel")
CHAIN = DraftModelSettings(policy=FixedSettings(max_tokens=2))


@pytest.mark.parametrize(
    "sampling",
    [COUPLED, Sampling(temperature=0.7, top_k=3, coupling="gumbel")],
    ids=["plain", "top-k"],
)
def test_coupled_samples_have_the_targets_joint_distribution(
    toy_pair: Pair, sampling: Sampling
) -> None:
    counts = engine_counts(toy_pair, Configuration(drafter=CHAIN, sampling=sampling), 10_000)
    assert p_value(counts, joint(toy_pair, sampling)) > 1e-3


def test_the_test_notices_noise_that_is_not_exponential(
    toy_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uniform(self: SharedNoise, position: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + position)
        return torch.rand(self.size, generator=generator) + 1e-3

    monkeypatch.setattr(coupling.SharedNoise, "at", uniform)
    counts = engine_counts(toy_pair, Configuration(drafter=CHAIN, sampling=COUPLED), 10_000)
    assert p_value(counts, joint(toy_pair, COUPLED)) < 1e-9


@pytest.mark.parametrize(
    "drafter",
    [CHAIN, DraftModelSettings(policy=SvipSettings(threshold=1.0)), PromptLookupSettings()],
    ids=["chain", "svip", "lookup"],
)
def test_coupled_output_does_not_depend_on_what_is_drafted(
    tiny_pair: Pair, drafter: object
) -> None:
    requests = [Request(str(i), (5 + i, 6, 7), 40, seed=i, ignore_eos=True) for i in range(6)]
    alone = Engine(tiny_pair, Configuration(sampling=COUPLED)).generate(requests)
    drafted = Engine(tiny_pair, Configuration(drafter=drafter, sampling=COUPLED), slots=3)
    assert [g.tokens for g in drafted.generate(requests)] == [g.tokens for g in alone]


def test_coupled_drafts_agree_as_often_as_the_formula_says() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 12, generator=generator).pow(3)
    p, q = p / p.sum(), q / q.sum()
    draws = 4000
    agreeing = 0
    for seed in range(draws):
        noise = SharedNoise(seed, 12)
        x, y = race(p[None], [noise], [3]), race(q[None], [noise], [3])
        agreeing += int(x == y)
    expected = float(acceptance(p, q))
    assert binomtest(agreeing, draws, expected).pvalue > 1e-3
    variation = float((p - q).abs().sum() / 2)
    assert (1 - variation) / (1 + variation) <= expected <= 1 - variation


def test_acceptance_is_1_for_equal_and_0_for_disjoint_distributions() -> None:
    p = torch.tensor([0.5, 0.5, 0.0, 0.0])
    assert float(acceptance(p, p)) == pytest.approx(1)
    assert float(acceptance(p, p.flip(0))) == 0


def test_noise_is_a_function_of_seed_and_position_alone() -> None:
    first, again = SharedNoise(7, 16), SharedNoise(7, 16)
    later = [first.at(position) for position in range(200)]
    assert all(torch.equal(again.at(p), later[p]) for p in reversed(range(200)))
    assert not torch.equal(first.at(0), first.at(1))
    assert not torch.equal(first.at(0), SharedNoise(8, 16).at(0))
    assert np.isclose(torch.stack(later).mean(), 1, atol=0.1)
