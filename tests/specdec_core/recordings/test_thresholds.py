"""The threshold found on a recording is the cheapest one there is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PolicySettings
from specdec_core.cost import immediate_costs
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.confidence import ConfidenceSettings
from specdec_core.drafting.policies.confidence_product import ConfidenceProductSettings
from specdec_core.drafting.policies.decision import DecisionSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.oracle import OracleSettings
from specdec_core.drafting.policies.specdecpp import SpecDecPlusPlusSettings
from specdec_core.drafting.policies.svip import SvipSettings
from specdec_core.engine import Request
from specdec_core.models.pair import Pair
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.recordings.record import Recorder
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Header, Recording, save_header, write_shard
from specdec_core.recordings.thresholds import (
    BestThreshold,
    best_threshold,
    decision_cost,
    distinct_thresholds,
)
from specdec_core.tokens.statistics import Counts
from tests.conftest import save_random_head

POLICIES: dict[str, PolicySettings] = {
    "confidence": ConfidenceSettings(max_tokens=12),
    "svip": SvipSettings(),
    "confidence_product": ConfidenceProductSettings(),
    "specdecpp": SpecDecPlusPlusSettings(head="specdecpp"),
    "decision": DecisionSettings(head="t1"),
    "decision, cumulative": DecisionSettings(head="t2", cumulative=True),
}
COST = decision_cost(c1=1, c2=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("thresholds")


@pytest.fixture(scope="module")
def replay(tiny_pair: Pair, folder: Path) -> Replay:
    """A few short prompts, so that every threshold can be tried."""
    header = Header(
        pair=tiny_pair.spec,
        fingerprints=tiny_pair.fingerprints,
        eos_token_ids=tuple(tiny_pair.eos_token_ids),
        prompts=PromptSet(source="made up", count=4, digest="0"),
        max_new_tokens=30,
        mixing=0,
    )
    requests = [Request(str(i), tuple(range(5 + i, 12 + 3 * i)), 30) for i in range(4)]
    save_header(header, folder)
    write_shard(Recorder(tiny_pair, header).record(list(enumerate(requests))), folder, 0)
    return Replay(Recording.open(folder))


@pytest.fixture(scope="module", params=POLICIES)
def policy(request: pytest.FixtureRequest, tiny_pair: Pair, folder: Path) -> PolicySettings:
    """Each policy that has a threshold; heads have random weights."""
    policy = POLICIES[request.param]
    if not hasattr(policy, "head"):
        return policy
    save_random_head(tiny_pair, policy.head, folder / policy.head)
    return policy.model_copy(update={"head": str(folder / policy.head)})


@pytest.fixture(scope="module")
def best_of_all(replay: Replay, policy: PolicySettings) -> BestThreshold:
    """The best of all thresholds that make a difference."""
    return best_threshold(replay, policy, COST, points=len(distinct_thresholds(replay, policy)))


def run(replay: Replay, policy: PolicySettings) -> Counts:
    return replay.run(Configuration(drafter=DraftModelSettings(policy=policy))).counts


def with_threshold(policy: PolicySettings, threshold: float) -> PolicySettings:
    return type(policy)(**{**policy.model_dump(), "threshold": threshold})


class TestEveryRule:
    def test_no_threshold_is_cheaper_than_the_best_of_all(self, replay, policy, best_of_all):
        edges = distinct_thresholds(replay, policy)
        assert len(best_of_all.curve) == len(edges)
        grid = np.linspace(0, max(1.0, edges[-1]), 150)
        costs = [COST(run(replay, with_threshold(policy, h))) for h in grid]
        assert best_of_all.cost <= min(costs)
        assert best_of_all.cost < max(costs)

    def test_a_few_tries_come_close_to_the_best_of_all(self, replay, policy, best_of_all):
        few = best_threshold(replay, policy, COST, points=16)
        assert len(few.curve) <= 3 * 16
        assert best_of_all.cost <= few.cost <= 1.02 * best_of_all.cost
        assert few.counts == run(replay, few.policy)
        assert few.cost == COST(few.counts)
        assert few.curve == sorted(few.curve)
        assert (few.threshold, few.cost) in few.curve

    def test_the_ends_always_stop_and_never_stop(self, replay, policy):
        edges = distinct_thresholds(replay, policy)
        shortest = getattr(policy, "min_tokens", 1)
        ends = [run(replay, with_threshold(policy, h)) for h in (edges[0], edges[-1])]
        fixed = [run(replay, FixedSettings(max_tokens=k)) for k in (shortest, policy.max_tokens)]
        lowest_stops = isinstance(policy, SvipSettings | SpecDecPlusPlusSettings)
        assert ends == (fixed if lowest_stops else fixed[::-1])

    def test_dearer_verification_asks_for_longer_drafts(self, replay, policy):
        drafted = [
            best_threshold(replay, policy, decision_cost(1, c2), points=16).counts
            for c2 in (0.1, 4, 100)
        ]
        rounds = [counts.n_target for counts in drafted]
        assert rounds[0] > rounds[-1]
        assert rounds == sorted(rounds, reverse=True)


def test_the_cost_is_that_of_the_runs_decisions(replay):
    policy = ConfidenceSettings(threshold=0.5)
    rounds = replay.run(Configuration(drafter=DraftModelSettings(policy=policy)))
    costs = immediate_costs(rounds.frame(), t_draft=3, t_target=20)
    assert decision_cost(3, 17)(rounds.counts) == costs["cost"].sum()


def test_the_oracle_is_cheaper_than_any_threshold(replay):
    assert COST(run(replay, OracleSettings())) < best_threshold(replay, SvipSettings(), COST).cost


def test_a_policy_without_a_threshold_is_refused(replay):
    with pytest.raises(TypeError, match="fixed has no threshold"):
        best_threshold(replay, FixedSettings(), COST)


def test_drafts_longer_than_recorded_are_one_line(replay):
    with pytest.raises(UserError, match="at most 20 were recorded"):
        best_threshold(replay, SvipSettings(max_tokens=25), COST)
