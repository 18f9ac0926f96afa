"""The papers' equations give the papers' numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specdec_core.cost import (
    Hardware,
    identity_gap,
    improvement_factor,
    latency,
    oracle_counts,
    post_use_speedup,
    regress_forward_times,
)
from specdec_core.tokens.statistics import Counts
from tests.specdec_core.cost.examples import TOKEN, counts
from tests.specdec_core.cost.runs import POLICIES, decode, drafting


class TestPaperFormulas:
    def test_latency_gives_the_papers_oracle_throughput(self):
        # SpecDec++, §4.1: N_target/N = 0.164 and 27.06 tokens/s (a mean of ratios) on their times.
        assert 1 / latency(0.0234, 0.112, 0.0, 0.164) == pytest.approx(27.06, rel=0.05)

    def test_improvement_factor_is_leviathans(self):
        assert improvement_factor(0.8, 5, 0.0) == pytest.approx(3.689, abs=1e-3)
        assert improvement_factor(0.0, 5, 0.1) == pytest.approx(1 / 1.5)
        assert improvement_factor(1.0, 5, 0.1) == pytest.approx(6 / 1.5)
        nearly = improvement_factor(1 - 1e-9, 5, 0.1)
        assert nearly == pytest.approx(improvement_factor(1.0, 5, 0.1))

    def test_improvement_factor_is_the_mean_of_simulated_rounds(self):
        alpha, gamma, c = 0.7, 4, 0.2
        rng = np.random.default_rng(0)
        accepted = np.cumprod(rng.random((200_000, gamma)) < alpha, axis=1).sum(axis=1)
        simulated = (accepted + 1).mean() / (gamma * c + 1)
        assert improvement_factor(alpha, gamma, c) == pytest.approx(simulated, rel=5e-3)

    def test_oracle_needs_a_verification_for_each_disagreement_and_one_more(self):
        c = oracle_counts([3, 0], [20, 10])
        assert (c.n, c.n_target, c.n_discarded, c.n_draft) == (30, 5, 0, 25)
        assert identity_gap(c) == 0

    def test_oracle_bounds_every_walk_that_knows_the_disagreements(self):
        rng = np.random.default_rng(0)
        for _ in range(200):
            length = int(rng.integers(1, 20))
            differs = rng.random(length) < rng.random()
            c = oracle_counts([int(differs.sum())], [length])
            position = rounds = 0
            while position < length:
                while position < length - 1 and not differs[position]:
                    position += 1
                position += 1
                rounds += 1
            # The theorem's last verification is spared where the text ends on a disagreement.
            assert rounds == c.n_target - int(differs[-1] and not differs.all())

    def test_oracle_refuses_more_disagreements_than_tokens(self):
        with pytest.raises(ValueError, match="5 disagreements in 4 tokens"):
            oracle_counts([5], [4])

    def test_oracle_of_a_profile_predicts_its_speedup(self, profile):
        c, speedup = profile.oracle([4], [40], "small")
        seconds = 40 * (TOKEN.seconds(1, 256, 1) + 1e-4)
        assert speedup == pytest.approx(seconds / profile.estimate_seconds(c, "small"))


class TestPostUseSpeedup:
    """Post-use, Eq. 3, is Eq. 3.1 of SpecDec++ in other letters."""

    @staticmethod
    def by_equation_3_1(c: Counts, t_draft: float, t_target: float) -> float:
        return t_target * c.n / (t_draft * c.n_draft + t_target * c.n_target)

    @pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.label)
    def test_equals_the_speedup_of_real_chains(self, tiny_pair, policy):
        c = Counts.of(decode(tiny_pair, drafting(policy, temperature=1.0)))
        rates = c.metrics()
        found = post_use_speedup(rates["mat"], rates["utilisation"], 0.0234, 0.112)
        assert found == pytest.approx(self.by_equation_3_1(c, 0.0234, 0.112))

    def test_equals_the_speedup_that_a_profile_of_constant_times_predicts(self):
        c = counts(n_draft=40, n_target=10, n_discarded=12)
        hardware = Hardware(name="m", target=0.112, drafts={"*": 0.0234})
        predicted = hardware.profile(["draft"]).speedup(c)
        assert post_use_speedup(38 / 10, 38 / 40, 0.0234, 0.112) == pytest.approx(predicted)

    def test_drafting_without_forwards_gains_what_is_accepted(self):
        assert post_use_speedup(3.0, math.inf, 0.0234, 0.112) == pytest.approx(3.0)

    def test_rates_of_nothing_are_refused(self):
        with pytest.raises(ValueError, match="utilisation"):
            post_use_speedup(3.0, 0.0, 0.0234, 0.112)


class TestRegression:
    def test_forward_times_are_recovered_from_real_looking_runs(self):
        rng = np.random.default_rng(0)
        passes = rng.integers(20, 400, size=(60, 2))
        seconds = passes @ [0.0234, 0.112] * rng.normal(1, 0.01, size=60)
        found = regress_forward_times(
            (int(d), int(t), s) for (d, t), s in zip(passes, seconds, strict=True)
        )
        assert found.t_draft == pytest.approx(0.0234, rel=0.05)
        assert found.t_target == pytest.approx(0.112, rel=0.05)
        assert found.r2 > 0.98

    def test_standalone_runs_have_only_a_target_time(self):
        found = regress_forward_times([(0, 10, 1.0), (0, 30, 3.0)])
        assert (found.t_draft, found.t_target) == (0.0, pytest.approx(0.1))

    @pytest.mark.parametrize("runs", [[], [(4, 1, 1.0)], [(4, 1, 1.0), (8, 2, 2.0)]])
    def test_runs_that_determine_nothing_are_refused(self, runs):
        with pytest.raises(ValueError, match="too alike"):
            regress_forward_times(runs)
