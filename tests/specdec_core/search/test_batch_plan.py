"""The plan of K by batch size: its counts are the engine's, and its choice is the cheapest."""

from __future__ import annotations

import pytest

from specdec_core.config import Configuration
from specdec_core.cost import ForwardCost, Measurement, Profile
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.search.batch_plan import (
    agreement,
    batch_policy,
    best_lengths,
    chain_counts,
    predict,
)
from specdec_core.tokens.statistics import Counts

PROMPTS = [tuple(range(5, 5 + n)) for n in (3, 9, 17)]


@pytest.mark.parametrize("length", [1, 4])
def test_counts_from_agreement_are_those_of_decoding(tiny_pair: Pair, length: int) -> None:
    requests = [Request(str(i), p, 24, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    outputs = [g.tokens for g in Engine(tiny_pair).generate(requests)]
    agreeing = agreement(tiny_pair.drafts["draft"], PROMPTS, outputs)
    drafter = DraftModelSettings(policy=FixedSettings(max_tokens=length))
    engine = Engine(tiny_pair, Configuration(drafter=drafter))
    engine.drafter.eos_token_ids = frozenset()
    live = Counts.of(engine.generate(requests))
    assert 0 < live.n_accepted < live.n_drafted
    assert chain_counts(agreeing, length) == live


def cost(per_row: float) -> ForwardCost:
    """1 ms, and `per_row` ms more for every token fed in."""
    shapes = [(w, b) for w in (1, 2, 5, 9) for b in (1, 2, 16)]
    return ForwardCost.fit(
        [
            Measurement(width=w, context=8, batch=b, seconds=1e-3 * (1 + per_row * w * b))
            for w, b in shapes
        ]
    )


def counts(length: int, accepted: float) -> Counts:
    """Of 1,000 rounds that keep `accepted` of their candidates each."""
    kept = round(1000 * accepted)
    drafted = 1000 * length
    return Counts(1, kept + 1000, drafted, 1000, drafted - kept, drafted, kept, 1000, drafted)


def test_the_choice_is_the_fastest_of_all_by_hand() -> None:
    profile = Profile(
        target=cost(0.1),
        drafts={"d": cost(0.01)},
        device="cpu",
        target_dtype="float32",
        draft_dtype="float32",
    )
    found = predict(profile, {1: counts(1, 0.7), 4: counts(4, 1.8)}, (1, 16), context=8)
    by_hand = {
        (1, 0): 1 / 1.1,
        (1, 1): 1.7 / (1.2 + 1.01),
        (1, 4): 2.8 / (1.5 + 4 * 1.01),
        (16, 0): 16 / 2.6,
        (16, 1): 16 * 1.7 / (4.2 + 1.16),
        (16, 4): 16 * 2.8 / (9 + 4 * 1.16),
    }
    for row in found.itertuples():
        expected = by_hand[row.batch, row.tokens]
        assert row.tokens_per_second == pytest.approx(1e3 * expected, rel=1e-6)
        assert row.speedup == pytest.approx(expected / by_hand[row.batch, 0], rel=1e-6)
    assert best_lengths(found) == {
        batch: max((0, 1, 4), key=lambda k: by_hand[batch, k]) for batch in (1, 16)
    }


def test_a_policy_names_where_k_changes() -> None:
    policy = batch_policy({1: 6, 2: 6, 3: 4, 4: 4, 8: 0, 16: 0})
    assert policy.tokens == {1: 6, 3: 4, 8: 0}
    assert batch_policy({4: 2, 8: 1}).tokens == {1: 2, 8: 1}  # fewer were not asked about
    assert batch_policy({1: 0, 16: 0}) is None
