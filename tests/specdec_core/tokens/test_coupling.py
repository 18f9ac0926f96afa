"""Coupled sampling: the target's distribution, an output that no draft changes, and the acceptance
that the formula says."""

import numpy as np
import torch
from scipy.stats import binomtest

from specdec_core.config import Sampling
from specdec_core.tokens import coupling
from specdec_core.tokens.coupling import SharedNoise, scores
from tests.specdec_core.fits import fit
from tests.specdec_core.kinds import chain

COUPLED = Sampling(temperature=1.0, coupling="gumbel")
CHAIN = chain(max_tokens=2) | {"draft": "far"}


def acceptance(p, q):
    """Probability that draws of p and q (..., vocabulary) coupled by the same noise agree."""
    # 1 / Σ_y max(p(y)/p(x), q(y)/q(x)), 0 where p(x) or q(x) is 0.
    ratio = torch.maximum(p[..., None, :] / p[..., :, None], q[..., None, :] / q[..., :, None])
    return (1 / ratio.sum(dim=-1)).nan_to_num(0.0).sum(dim=-1)


def test_coupled_samples_have_the_targets_joint_distribution():
    assert fit(CHAIN, Sampling(temperature=0.7, top_k=3, coupling="gumbel"), 4_000) > 1e-3


def test_the_test_notices_noise_that_is_not_exponential(monkeypatch):
    def uniform(self, position):
        generator = torch.Generator().manual_seed(1000 * self.seed + position)
        return torch.rand(self.size, generator=generator) + 1e-3

    monkeypatch.setattr(coupling.SharedNoise, "at", uniform)
    assert fit(CHAIN, COUPLED, 4_000) < 1e-6


def test_coupled_drafts_agree_as_often_as_the_formula_says():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 12, generator=generator).pow(3)
    p, q = p / p.sum(), q / q.sum()
    draws = 4000
    agreeing = 0
    for seed in range(draws):
        noise = SharedNoise(seed, 12)
        x, y = (scores(each[None], [noise], [3]).argmax(-1) for each in (p, q))
        agreeing += int(x == y)
    expected = float(acceptance(p, q))
    assert binomtest(agreeing, draws, expected).pvalue > 1e-3
    variation = float((p - q).abs().sum() / 2)
    assert (1 - variation) / (1 + variation) <= expected <= 1 - variation


def test_noise_is_a_function_of_seed_and_position_alone():
    first, again = SharedNoise(7, 16), SharedNoise(7, 16)
    later = [first.at(position) for position in range(200)]
    assert all(torch.equal(again.at(p), later[p]) for p in reversed(range(200)))
    assert not torch.equal(first.at(0), first.at(1))
    assert not torch.equal(first.at(0), SharedNoise(8, 16).at(0))
    assert np.isclose(torch.stack(later).mean(), 1, atol=0.1)
