"""Lemma 3.1 on counts of the engine."""

from collections import Counter

import pytest

from specdec_core.config import Sampling
from specdec_core.engine import Engine, Request
from specdec_core.tokens.statistics import Counts
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
