"""Lemma 3.1 holds on what the engine really counts."""

from __future__ import annotations

import pytest

from specdec_core.tokens.statistics import Counts
from tests.specdec_core.cost.runs import POLICIES, decode, drafting, frequent_token


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.label)
class TestIdentityOnLiveCounts:
    """Lemma 3.1: N_draft + N_target = N + N_discarded."""

    def test_requests_ended_by_their_length(self, tiny_pair, policy, temperature):
        configuration = drafting(policy, temperature)
        generations = decode(tiny_pair, configuration, ignore_eos=True)
        for c in [Counts.of(generations), *(g.counts for g in generations)]:
            assert c.n_draft > 0
            assert c.n_draft + c.n_target == c.n + c.n_discarded

    def test_requests_ended_by_an_end_token(self, tiny_pair, policy, temperature, monkeypatch):
        configuration = drafting(policy, temperature)
        end = frequent_token(decode(tiny_pair, configuration, ignore_eos=True))
        monkeypatch.setattr(tiny_pair.target.generation_config, "eos_token_id", end)
        generations = decode(tiny_pair, configuration)
        assert any(g.finish_reason == "stop" for g in generations)
        for g in generations:
            c = g.counts
            # A verification whose own token was discarded, because the request ended before it.
            wasted = c.n_target - c.n_target_tokens
            assert c.n_draft + c.n_target - wasted == c.n + c.n_discarded
            assert wasted in ((0, 1) if g.finish_reason == "stop" else (0,))
