"""What every length policy promises: its rule at the boundary, its bounds, its independence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import yaml

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PolicySettings, Sampling, parse
from specdec_core.config.kinds import POLICIES, kinds_of
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.drafter import SlotState
from specdec_core.drafting.policies.break_even import BreakEvenSettings
from specdec_core.drafting.policies.by_batch import ByBatchSettings
from specdec_core.drafting.policies.confidence import ConfidenceProductSettings, ConfidenceSettings
from specdec_core.drafting.policies.decision import DecisionSettings
from specdec_core.drafting.policies.dynamic_confidence import DynamicConfidenceSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.heuristic import HeuristicSettings
from specdec_core.drafting.policies.oracle import OracleSettings
from specdec_core.drafting.policies.policy import LengthPolicy, PolicyOutcome, build_policy
from specdec_core.drafting.policies.pre_cut import PreCutSettings
from specdec_core.drafting.policies.signals import Signals
from specdec_core.drafting.policies.specdecpp import SpecDecPlusPlusSettings
from specdec_core.drafting.policies.svip import SvipSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.statistics import Generation
from specdec_core.tokens.token_tree import TokenTree

PER_REQUEST = [
    FixedSettings(max_tokens=4),
    HeuristicSettings(start=3, max_tokens=9),
    ConfidenceSettings(threshold=0.1),
    SvipSettings(threshold=2.2),
    ConfidenceProductSettings(threshold=0.05),
    DynamicConfidenceSettings(start=0.1),
    BreakEvenSettings(target_cost=5),
]
LASTING = [HeuristicSettings(transient=False), PreCutSettings(max_tokens=8, target_cost=5)]
WITHOUT_HEAD = PER_REQUEST + LASTING
BY_BATCH = ByBatchSettings(tokens={4: 0, 1: 6, 2: 3})
WITH_HEAD = [SpecDecPlusPlusSettings(head="h"), DecisionSettings(head="h")]
ALL = [*WITHOUT_HEAD, *WITH_HEAD, BY_BATCH, OracleSettings()]

PROMPTS = [tuple(range(5, 5 + n)) for n in (3, 9, 17, 30, 1)]


def kind(policy: PolicySettings) -> str:
    return policy.kind


def build(settings: PolicySettings) -> LengthPolicy:
    def no_head(name: str) -> None:
        raise AssertionError(f"{settings.kind} asked for the head {name}")

    return build_policy(settings, no_head)


def go_on(policy: LengthPolicy, *rows: Sequence[float], position: int = 1) -> list[bool]:
    """The answers for slots 0, 1, … whose drafted token is the first of each distribution."""
    probs = torch.tensor(rows)
    slots = range(len(rows))
    tokens, positions = [0] * len(rows), [position] * len(rows)
    return list(policy.go_on(Signals(slots, tokens, positions, probs.log(), probs)))


def two(probability: float) -> tuple[float, float]:
    """A distribution over two tokens, the drafted one first."""
    return probability, 1 - probability


def decode(
    pair: Pair, policy: PolicySettings, slots: int = 1, **sampling: float
) -> list[Generation]:
    configuration = Configuration(
        drafter=DraftModelSettings(policy=policy), sampling=Sampling(**sampling)
    )
    requests = [Request(str(i), p, 24, seed=i) for i, p in enumerate(PROMPTS)]
    return Engine(pair, configuration, slots).generate(requests)


def lengths(generations: list[Generation]) -> list[list[tuple[int, int]]]:
    return [[(r.drafted, r.accepted) for r in g.rounds] for g in generations]


def test_every_kind_of_policy_is_tested_here() -> None:
    assert {policy.kind for policy in ALL} == set(POLICIES)


def test_fixed_drafts_on_whatever_it_sees() -> None:
    policy = build(FixedSettings(max_tokens=3))
    assert policy.limit(0) == 3
    assert go_on(policy, two(0.001), two(0.999)) == [True, True]


def test_confidence_stops_strictly_below_its_threshold() -> None:
    policy = build(ConfidenceSettings(threshold=0.5))
    assert go_on(policy, (0.5, 0.25, 0.25), (0.49, 0.26, 0.25)) == [True, False]
    # The peak counts, not the token that was drawn.
    assert go_on(policy, (0.1, 0.9)) == [True]


def test_svip_stops_where_the_root_of_the_entropy_is_above_its_threshold() -> None:
    root = math.sqrt(math.log(2))  # of the uniform distribution over two
    for threshold, expected in ((root * 1.0001, True), (root * 0.9999, False)):
        assert go_on(build(SvipSettings(threshold=threshold)), two(0.5)) == [expected]


def test_confidence_product_multiplies_the_drawn_tokens_of_one_round() -> None:
    policy = build(ConfidenceProductSettings(threshold=0.25))
    policy.limit(0), policy.limit(1)
    assert go_on(policy, two(0.5), two(0.75)) == [True, True]
    assert go_on(policy, two(0.5), two(0.3125), position=2) == [True, False]
    policy.limit(1)
    assert go_on(policy, two(0.5), two(0.3125)) == [False, True]


def test_heuristic_grows_after_full_acceptance_and_shrinks_otherwise() -> None:
    policy = build(HeuristicSettings(start=2, increase=3, decrease=2, max_tokens=7))
    seen = [policy.limit(0)]
    for drafted, accepted in ((2, 2), (5, 5), (7, 7), (7, 6), (5, 0), (3, 2), (1, 0)):
        policy.observe(0, PolicyOutcome(drafted, accepted, drafted))
        seen.append(policy.limit(0))
    assert seen == [2, 5, 7, 7, 5, 3, 1, 1]


def test_heuristic_starts_anew_with_a_request_unless_it_lasts() -> None:
    for transient, expected in ((True, 5), (False, 7)):
        policy = build(HeuristicSettings(start=5, transient=transient))
        policy.observe(0, PolicyOutcome(5, 5, 5))
        policy.reset(0)
        assert policy.limit(0) == expected
        assert policy.limit(1) == 5


@pytest.mark.parametrize("start", [0.1, 0.5])
def test_dynamic_confidence_begins_with_its_start(start: float) -> None:
    policy = build(DynamicConfidenceSettings(start=start))
    nearly = math.nextafter(start, 0)
    assert go_on(policy, two(0.5), two(0.25)) == [True, start < 0.25]
    assert nearly < policy.threshold(0) == start


def test_dynamic_confidence_moves_between_what_was_accepted_and_rejected() -> None:
    policy = build(DynamicConfidenceSettings(start=0.125))
    for _ in range(3):  # 0.75 is accepted, 0.25 is not
        assert go_on(policy, two(0.75)) == [True]
        assert go_on(policy, two(0.25), position=2) == [True]
        assert go_on(policy, two(0.75), position=3) == [True]
        policy.observe(0, PolicyOutcome(drafted=3, accepted=1, draft_calls=3))
    assert policy.threshold(0) == 0.75
    assert go_on(policy, two(0.75), two(0.25)) == [True, True]  # slot 1 has learned nothing
    assert go_on(policy, two(0.5), position=2) == [False]
    policy.reset(0)
    assert policy.threshold(0) == 0.125


def test_the_oracle_cannot_be_built_for_decoding() -> None:
    with pytest.raises(UserError, match="replay"):
        build(OracleSettings())


@pytest.mark.parametrize("policy", WITHOUT_HEAD, ids=kind)
def test_greedy_output_is_the_targets_own(tiny_pair: Pair, policy: PolicySettings) -> None:
    requests = [Request(str(i), p, 24) for i, p in enumerate(PROMPTS)]
    alone = Engine(tiny_pair).generate(requests)
    generations = decode(tiny_pair, policy, slots=2)
    assert [g.tokens for g in generations] == [g.tokens for g in alone]
    assert max(drafted for rounds in lengths(generations) for drafted, _ in rounds) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_by_batch_drafts_as_many_as_its_table_says_for_the_requests_of_the_round(
    tiny_pair: Pair, temperature: float
) -> None:
    """Five requests for four slots, the last ones alone: the table is read in all its places."""
    configuration = Configuration(
        drafter=DraftModelSettings(policy=BY_BATCH), sampling=Sampling(temperature=temperature)
    )
    engine = Engine(tiny_pair, configuration, slots=4)
    propose, most = engine.drafter.propose, dict.fromkeys((1, 2, 3, 4), 0)

    def noted(sequences: Sequence[SlotState]) -> list[TokenTree]:
        trees = propose(sequences)
        batch = sequences[0].batch  # with those in their first round, who are not asked
        most[batch] = max(most[batch], *map(len, trees))
        return trees

    engine.drafter.propose = noted
    sizes = (12, 12, 20, 28, 60)
    requests = [Request(str(i), p, n) for i, (p, n) in enumerate(zip(PROMPTS, sizes, strict=True))]
    generations = engine.generate(requests)
    assert most == {1: 6, 2: 3, 3: 3, 4: 0}
    if not temperature:
        alone = Engine(tiny_pair).generate(requests)
        assert [g.tokens for g in generations] == [g.tokens for g in alone]


def test_by_batch_reads_its_table_from_the_largest_number_that_is_reached() -> None:
    assert [BY_BATCH.at(n) for n in (1, 2, 3, 4, 400)] == [6, 3, 3, 0, 0]
    assert BY_BATCH.max_tokens == 6
    written = Configuration(drafter=DraftModelSettings(policy=BY_BATCH))
    assert parse(Configuration, yaml.safe_load(written.to_yaml()), "") == written


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ({2: 3}, "no K for 1 request"),
        ({1: 0, 4: 0}, "drafts nothing"),
        ({1: -1}, "greater than or equal to 0"),
        ({0: 2, 1: 3}, "greater than or equal to 1"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(tokens: dict[int, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse(ByBatchSettings, {"tokens": tokens}, "policy")


def changed(name: str, value: object) -> object:
    """Another value of a setting."""
    others = {"head": "other", "table": "learned.json", "transient": False, "cumulative": True}
    others |= {"tokens": {1: 7}, "target_cost": 9.0, "q_init": "confidence", "updates": False}
    if name in others:
        return others[name]
    return value + 1 if isinstance(value, int) else value * 0.75


def test_policies_that_differ_have_different_sentences() -> None:
    sentences = []
    for settings in kinds_of(POLICIES, PolicySettings).values():
        needed = {"head": "h", "tokens": {1: 4, 8: 2}}
        own = {name: value for name, value in needed.items() if name in settings.model_fields}
        plain = settings(**own)
        values = {name: value for name, value in plain if name != "kind"}
        sentences.append(plain.sentence)
        sentences += [
            settings(**{**values, name: changed(name, value)}).sentence
            for name, value in values.items()
        ]
    assert sorted(sentences) == sorted(set(sentences))


@pytest.mark.parametrize(
    ("policy", "label"),
    [
        (BY_BATCH, "K=6/3/0 by batch"),
        (HeuristicSettings(transient=False, increase=1), "lasting heuristic 5"),
        (DynamicConfidenceSettings(), "dynamic confidence 0.4"),
        (ConfidenceProductSettings(threshold=0.25, max_tokens=8), "product 0.25 up to 8"),
        (PreCutSettings(target_cost=7.25, learning_rate=0.3), "pre-cut 7.25"),
    ],
)
def test_labels_read_well(policy: PolicySettings, label: str) -> None:
    assert policy.label == label
