"""The oracle needs a verification for each disagreement (SpecDec++, Thm 4.1)."""

import numpy as np
import pytest

from specdec_core.cost import oracle_counts
from tests.specdec_core.cost.examples import truth


class TestOracle:
    def test_oracle_needs_a_verification_for_each_disagreement_and_one_more(self):
        c = oracle_counts([3, 0], [20, 10])
        assert (c.n, c.n_target, c.n_discarded, c.n_draft) == (30, 5, 0, 25)

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
        c = oracle_counts([4], [40])
        speedup = profile.speedup(c, "small")
        seconds = 40 * (truth(1, 256) + 1e-4)
        assert speedup == pytest.approx(seconds / profile.estimate_seconds(c, "small"))
