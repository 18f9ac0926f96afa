"""Lemma 3.1 on counts of the engine, and SpecDec++'s Theorem 4.1 of the oracle."""

from collections import Counter

import numpy as np
import pytest

from specdec_core.config import Sampling
from specdec_core.cost import oracle_counts
from specdec_core.engine import Engine, Request
from specdec_core.tokens.statistics import Counts
from tests.specdec_core.cost.examples import truth
from tests.specdec_core.kinds import chain, configured

POLICIES = {"fixed": {"max_tokens": 4}, "heuristic": {}, "svip": {"threshold": 1.0}, "pre_cut": {}}


def decode(pair, policy, temperature, **options):
    drafter = chain(policy, **POLICIES[policy])
    requests = [
        Request(str(i), tuple(range(5 + i, 12 + 3 * i)), 17 + 4 * i, seed=i, **options)
        for i in range(4)
    ]
    engine = Engine(pair, configured(drafter, Sampling(temperature=temperature)), slots=2)
    return engine.generate(requests)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_identity_holds_whatever_ends_a_request(tiny_pair, policy, temperature, monkeypatch):
    generations = decode(tiny_pair, policy, temperature, ignore_eos=True)
    for c in [Counts.of(generations), *(g.counts for g in generations)]:
        assert c.n_draft > 0
        assert c.n_draft + c.n_target == c.n + c.n_discarded
    # The most frequent token, as an end token, ends texts early.
    [(end, _)] = Counter(token for g in generations for token in g.tokens).most_common(1)
    monkeypatch.setattr(tiny_pair.target.generation_config, "eos_token_id", end)
    generations = decode(tiny_pair, policy, temperature)
    assert any(g.finish_reason == "stop" for g in generations)
    for g in generations:
        c = g.counts
        # A verification's token is discarded where the request ended before it.
        wasted = c.n_target - c.n_target_tokens
        assert c.n_draft + c.n_target - wasted == c.n + c.n_discarded
        assert wasted in ((0, 1) if g.finish_reason == "stop" else (0,))


class TestOracle:
    def test_oracle_needs_a_verification_for_each_disagreement_and_one_more(self):
        c = oracle_counts([3, 0], [20, 10])
        assert (c.n, c.n_target, c.n_discarded, c.n_draft) == (30, 5, 0, 25)
        with pytest.raises(ValueError, match="5 disagreements in 4 tokens"):
            oracle_counts([5], [4])

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

    def test_oracle_of_a_profile_predicts_its_speedup(self, profile):
        c = oracle_counts([4], [40])
        speedup = profile.speedup(c, "small")
        seconds = 40 * (truth(1, 256) + 1e-4)
        assert speedup == pytest.approx(seconds / profile.estimate_seconds(c, "small"))
