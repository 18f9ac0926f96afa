"""Thm 4.2: a run's decisions cost its time. Thm 4.3: stopping at its threshold is safe."""

from collections import Counter

import pandas as pd
import pytest

from research.papers.decisions import immediate_costs, stopping_threshold
from specdec_core.config import Configuration, PolicySettings, Sampling
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.confidence import SvipSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.heuristic import HeuristicSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.statistics import Counts, Generation, Round, rounds_frame

# Whole numbers, so that sums are exact.
T_DRAFT, T_TARGET = 3, 20
C1, C2 = T_DRAFT, T_TARGET - T_DRAFT
POLICIES = [FixedSettings(max_tokens=4), HeuristicSettings(), SvipSettings(threshold=1.0)]


def drafting(policy: PolicySettings, temperature: float = 0.0) -> Configuration:
    return Configuration(
        drafter=DraftModelSettings(policy=policy), sampling=Sampling(temperature=temperature)
    )


def decode(pair: Pair, configuration: Configuration, ignore_eos: bool = True) -> list[Generation]:
    requests = [
        Request(str(i), tuple(range(5 + i, 12 + 3 * i)), 17 + 4 * i, seed=i, ignore_eos=ignore_eos)
        for i in range(4)
    ]
    return Engine(pair, configuration, slots=2).generate(requests)


def round_of(drafted: int, accepted: int, generated: int, forwards: int | None = None) -> Round:
    forwards = drafted if forwards is None else forwards
    return Round(0, drafted, accepted, generated, forwards, 0.0, 0.0, 0.0)


def assert_costs_are_the_time(generations: list[Generation]) -> None:
    counts = Counts.of(generations)
    rounds = [r for g in generations for r in g.rounds]
    costs = immediate_costs(rounds, T_DRAFT, T_TARGET)
    total = T_DRAFT * counts.n_draft + T_TARGET * counts.n_target  # Eq. 3.1
    assert costs["seconds"].sum() == total
    assert costs["cost"].sum() == total - T_DRAFT * counts.n  # T_0
    assert costs["kept"].sum() == counts.n
    wasted = counts.n_target - counts.n_target_tokens
    assert costs["discarded"].sum() == counts.n_discarded + wasted
    assert (costs["action"] == "stop").sum() == counts.n_target
    assert (costs["candidate"] > 0).sum() == counts.n_draft


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.label)
def test_costs_of_real_runs_that_end_by_their_length_or_an_end_token(
    tiny_pair, policy, temperature, monkeypatch
):
    configuration = drafting(policy, temperature)
    generations = decode(tiny_pair, configuration)
    assert_costs_are_the_time(generations)
    tokens = Counter(token for g in generations for token in g.tokens)
    [(end, _)] = tokens.most_common(1)
    monkeypatch.setattr(tiny_pair.target.generation_config, "eos_token_id", end)
    ended = decode(tiny_pair, configuration, ignore_eos=False)
    assert any(g.finish_reason == "stop" for g in ended)
    for generation in (*generations, *ended):
        assert_costs_are_the_time([generation])


# A round (drafted, accepted, generated), and of each decision the candidate, action, discarded and
# kept tokens, and cost.
DECISIONS = {
    "rejection": (  # every candidate from the first rejection on costs a draft
        (3, 1, 2),
        [
            (1, "continue", 0, 1, 0),
            (2, "continue", 1, 0, C1),
            (3, "stop", 1, 1, C1 + C2),  # keeps the target's correction
        ],
    ),
    "all accepted": ((2, 2, 3), [(1, "continue", 0, 1, 0), (2, "stop", 0, 2, C2)]),
    "nothing drafted": ((0, 0, 1), [(0, "stop", 0, 1, C2)]),
    "the end accepted": ((2, 2, 2), [(1, "continue", 0, 1, 0), (2, "stop", 1, 1, C1 + C2)]),
    "candidates after the end": (
        (3, 1, 1),
        [(1, "continue", 0, 1, 0), (2, "continue", 1, 0, C1), (3, "stop", 2, 0, 2 * C1 + C2)],
    ),
}


@pytest.mark.parametrize("case", DECISIONS)
def test_each_decision_costs_what_the_theorem_says(case):
    round_counts, expected = DECISIONS[case]
    costs = immediate_costs([round_of(*round_counts)], T_DRAFT, T_TARGET)
    names = ["candidate", "action", "discarded", "kept", "cost"]
    assert list(costs[names].itertuples(index=False, name=None)) == expected


def test_rounds_and_frames_of_rounds_cost_the_same(tiny_pair):
    generations = decode(tiny_pair, drafting(POLICIES[1]))
    rounds = [r for g in generations for r in g.rounds]
    pd.testing.assert_frame_equal(
        immediate_costs(rounds_frame(generations, config_id="x"), 0.1, 1.0),
        immediate_costs(rounds, 0.1, 1.0),
    )
    assert len(immediate_costs([], T_DRAFT, T_TARGET)) == 0
    with pytest.raises(ValueError, match="0 draft forwards"):
        immediate_costs([round_of(2, 1, 2, forwards=0)], T_DRAFT, T_TARGET)


def test_the_stopping_threshold_is_the_papers_formula():
    assert stopping_threshold(1.0, 3.0) == pytest.approx(3 / 4)
    assert stopping_threshold(1.0, 3.0, delta=2.0) == pytest.approx(5 / 6)
    # The paper's own forward times.
    assert stopping_threshold(0.0234, 0.112 - 0.0234) == pytest.approx(0.791, abs=1e-3)
    assert stopping_threshold(2.0, -1.0) == 0  # a draft that costs more than the target
    for arguments in ((0.0, 1.0), (1.0, 1.0, -1.0), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match="c1 > 0"):
            stopping_threshold(*arguments)
