"""What every length policy promises: its rule at the boundary, its bounds, its independence."""

import math

import pytest
import torch

from specdec_core.base.errors import UserError
from specdec_core.config import Sampling
from specdec_core.drafting.policies.policy import PolicyOutcome, build_policy
from specdec_core.drafting.policies.signals import Signals
from specdec_core.engine import Engine, Request
from tests.specdec_core.kinds import configured, policy


def build(kind, **settings):
    def no_head(name):
        raise AssertionError(f"{kind} asked for the head {name}")

    return build_policy(policy(kind, **settings), no_head)


def go_on(policy, *rows, position=1):
    """The answers for slots 0, 1, …; each slot drafted the first token of its distribution."""
    probs = torch.tensor(rows)
    slots = range(len(rows))
    tokens, positions = [0] * len(rows), [position] * len(rows)
    return list(policy.go_on(Signals(slots, tokens, positions, probs.log(), probs)))


def two(probability):
    """A distribution over two tokens, the drafted one first."""
    return probability, 1 - probability


def test_fixed_drafts_on_whatever_it_sees():
    rule = build("fixed", max_tokens=3)
    assert rule.limit(0) == 3
    assert go_on(rule, two(0.001), two(0.999)) == [True, True]


def test_confidence_stops_strictly_below_its_threshold():
    rule = build("confidence", threshold=0.5)
    assert go_on(rule, (0.5, 0.25, 0.25), (0.49, 0.26, 0.25)) == [True, False]
    # The peak counts, not the token that was drawn.
    assert go_on(rule, (0.1, 0.9)) == [True]


def test_svip_stops_where_the_root_of_the_entropy_is_above_its_threshold():
    root = math.sqrt(math.log(2))  # of the uniform distribution over two
    for threshold, expected in ((root * 1.0001, True), (root * 0.9999, False)):
        assert go_on(build("svip", threshold=threshold), two(0.5)) == [expected]


def test_confidence_product_multiplies_the_drawn_tokens_of_one_round():
    rule = build("confidence_product", threshold=0.25)
    rule.limit(0), rule.limit(1)
    assert go_on(rule, two(0.5), two(0.75)) == [True, True]
    assert go_on(rule, two(0.5), two(0.3125), position=2) == [True, False]
    rule.limit(1)
    assert go_on(rule, two(0.5), two(0.3125)) == [False, True]


def test_heuristic_grows_after_full_acceptance_and_shrinks_otherwise():
    rule = build("heuristic", start=2, increase=3, decrease=2, max_tokens=7)
    seen = [rule.limit(0)]
    for drafted, accepted in ((2, 2), (5, 5), (7, 7), (7, 6), (5, 0), (3, 2), (1, 0)):
        rule.observe(0, PolicyOutcome(drafted, accepted, drafted))
        seen.append(rule.limit(0))
    assert seen == [2, 5, 7, 7, 5, 3, 1, 1]


def test_heuristic_starts_anew_with_a_request_unless_it_lasts():
    for transient, expected in ((True, 5), (False, 7)):
        rule = build("heuristic", start=5, transient=transient)
        rule.observe(0, PolicyOutcome(5, 5, 5))
        rule.reset(0)
        assert rule.limit(0) == expected
        assert rule.limit(1) == 5


def test_the_oracle_cannot_be_built_for_decoding():
    with pytest.raises(UserError, match="replay"):
        build("oracle")


@pytest.mark.parametrize(
    "drafter",
    [
        {"kind": "draft_model"},
        {"kind": "fork", "width": 2},
        {"kind": "dynamic_tree", "expand": 2, "children": 2, "keep": 12},
        {"kind": "cascade"},
    ],
    ids=lambda drafter: drafter["kind"],
)
def test_rounds_are_the_same_alone_and_beside_other_samplings(tiny_pair, drafter):
    """What a policy sees of a request does not depend on how the rest of its batch samples."""
    stops = {"kind": "svip", "threshold": 2.05, "max_tokens": 8}
    configuration = configured(drafter | {"policy": stops})
    sampled, greedy = Sampling(temperature=0.4, top_k=20), Sampling()
    requests = [
        Request("0", (5, 6, 7, 8), 24, greedy, seed=0),
        Request("1", (40, 41, 42), 24, sampled, seed=1),
        Request("2", (9, 8, 7, 6, 5), 24, greedy, seed=2),
    ]
    alone, together = (
        [
            [r.depth for r in g.rounds]
            for g in Engine(tiny_pair, configuration, n).generate(requests)
        ]
        for n in (1, 3)
    )
    assert together == alone
    assert len({depth for rounds in alone for depth in rounds}) > 2, "lengths do not vary"
