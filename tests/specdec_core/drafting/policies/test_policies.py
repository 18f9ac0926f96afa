"""What every length policy promises, alone and beside those of other slots."""

import math

import numpy as np
import pytest
import torch

from specdec_core.base.errors import UserError
from specdec_core.config import Sampling
from specdec_core.drafting.arms import PerSlot
from specdec_core.drafting.policies.break_even import BreakEvenPolicy, BreakEvenSettings, best_rate
from specdec_core.drafting.policies.heuristic import HeuristicPolicy
from specdec_core.drafting.policies.policy import PolicyOutcome, build_policy
from specdec_core.drafting.policies.signals import Signals
from specdec_core.engine import Engine, Request
from specdec_core.models.runner import Output
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


def test_tokens_that_are_excluded_have_no_part_in_the_entropy():
    """A grammar gives them a logit of -∞."""
    logits = torch.tensor([[0.3, -1.0, 0.7], [0.3, -torch.inf, 0.7]])
    signals = Signals([0, 1], [0, 0], [1, 1], logits, None)
    expected = torch.special.entr(logits.softmax(-1)).sum(-1)
    assert torch.allclose(signals.measure("entropy"), expected)


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


def test_values_that_are_not_copied_with_the_tokens_are_refused(monkeypatch):
    monkeypatch.setattr(HeuristicPolicy, "reads", ("entropy", "hidden"))
    with pytest.raises(UserError, match=r"heuristic: reads hidden, but what is copied .* entropy$"):
        build("heuristic")


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


SETTINGS = [
    policy("fixed", max_tokens=3),
    policy("confidence", threshold=0.4),
    policy("svip", threshold=1.1),
    policy("confidence_product", threshold=0.2),
    policy("heuristic", start=2),
    policy("pre_cut", target_cost=5),
]


def built():
    return [build_policy(settings, lambda head: None) for settings in SETTINGS]


def signals(seed, position, sampled):
    """Of one slot for each policy."""
    logits = torch.randn((len(SETTINGS), 20), generator=torch.Generator().manual_seed(seed)) * 3
    tokens = logits.argmax(dim=-1).tolist()
    probs = logits.softmax(dim=-1) if sampled else None
    slots = list(range(len(SETTINGS)))
    hidden = torch.arange(len(slots))[:, None].float()
    return Signals(slots, tokens, [position] * len(slots), logits, probs, hidden)


@pytest.mark.parametrize("sampled", [False, True])
def test_each_slot_gets_its_own_policys_answer(sampled):
    joint, alone = PerSlot(dict(enumerate(built()))), built()
    joint.chosen = {slot: slot for slot in range(len(SETTINGS))}
    for turn in range(4):
        assert [joint.limit(s) for s in joint.chosen] == [p.limit(s) for s, p in enumerate(alone)]
        for position in (1, 2, 3):
            seen = signals(10 * turn + position, position, sampled)
            expected = [own.go_on(seen.only([s]))[0] for s, own in enumerate(alone)]
            assert joint.go_on(seen) == expected
        for slot, own in enumerate(alone):
            joint.observe(slot, PolicyOutcome(3, turn, 3))
            own.observe(slot, PolicyOutcome(3, turn, 3))


def test_policies_ask_for_what_any_of_them_needs():
    plain, learner = built()[:1], built()[5:]
    assert not PerSlot(dict(enumerate(plain))).learns
    assert PerSlot(dict(enumerate([*plain, *learner]))).learns


LOGITS = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.5], [1.0, 1.5, 2.0]])


@pytest.mark.parametrize("name", ["probability", "top_probability"])
def test_a_forward_that_says_how_sure_it_is_is_believed(name):
    """Of tokens that were not the most likely ones nothing is known beforehand."""
    tokens = [1, 0, 2]
    expected = LOGITS.softmax(dim=-1).amax(dim=-1)
    read = Output([1, 1, 1], LOGITS)
    told = Output([1, 1, 1], LOGITS, confidence=torch.tensor([0.1, 0.2, 0.3]))
    for source, own in ((LOGITS, expected), (read, expected), (told, told.confidence)):
        signals = Signals([4, 5, 6], tokens, [1, 1, 1], source, None)
        signals.fetch([name])
        assert getattr(signals, name) == pytest.approx(own.tolist())
        part = Signals([4, 5, 6], tokens, [1, 1, 1], source, None).only([2, 0])
        assert getattr(part, name) == pytest.approx(own[[2, 0]].tolist())


MOST = 20
TOKENS = 4_000


class Text:
    """A draft's confidences behind every token, and whether its candidates are accepted: with
    probability q^`power`, so that a power other than 1 makes the draft too sure, or too modest."""

    def __init__(self, power, seed):
        rng = np.random.default_rng(seed)
        # How sure a draft is comes in stretches.
        level = np.repeat(rng.uniform(0.4, 4, TOKENS // 40), 40)
        self.q = rng.beta(2 * level, 1, TOKENS)
        self.accepted = rng.random(TOKENS) < self.q**power

    def rate(self, cost, length):
        """Tokens a draft call."""
        place = tokens = 0
        spent = 0.0
        while place < TOKENS - MOST - 1:
            drafted = length.of(self.q[place : place + MOST])
            right = self.accepted[place : place + drafted]
            kept = drafted if right.all() else int(right.argmin())
            length.learn(drafted, kept)
            tokens, spent, place = tokens + kept + 1, spent + cost + drafted, place + kept + 1
        return tokens / spent


class Length:
    """The confidence product with a threshold."""

    def __init__(self, threshold):
        self.threshold = threshold

    def of(self, q):
        below = np.cumprod(q) < self.threshold
        return int(below.argmax()) + 1 if below.any() else MOST

    def learn(self, drafted, accepted):
        """It does not."""


class BreakEven(Length):
    def __init__(self, cost):
        self.policy = BreakEvenPolicy(BreakEvenSettings(target_cost=cost, max_tokens=MOST))

    def of(self, q):
        for position, probability in enumerate(q, start=1):
            if not self.policy.go_on(one(float(probability), position))[0]:
                return position
        return MOST

    def learn(self, drafted, accepted):
        self.policy.observe(0, PolicyOutcome(drafted, accepted, drafted))


def one(probability, position, free=False):
    signals = Signals([0], [0], [position], torch.zeros(1, 2), None, free=[free])
    signals.__dict__["probability"] = [probability]
    return signals


@pytest.mark.parametrize(
    ("cost", "power", "least"), [(3.0, 0.6, 0.97), (10.0, 1.0, 0.97), (30.0, 2.0, 0.92)]
)
def test_it_is_as_fast_as_the_best_threshold_at_any_cost_and_nearly_with_a_draft_too_sure(
    cost, power, least
):
    text = Text(power, seed=7)
    best = max(text.rate(cost, Length(h)) for h in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8))
    assert text.rate(cost, BreakEven(cost)) > least * best


def test_every_request_begins_anew():
    policy = BreakEvenPolicy(BreakEvenSettings(target_cost=8))
    first = policy.threshold(0)
    assert first == pytest.approx(best_rate(0.7, 8, 20))
    policy.go_on(one(0.9, 1))
    policy.observe(0, PolicyOutcome(1, 0, 1))
    assert policy.threshold(0) != first
    assert policy.threshold(1) == first
    policy.reset(0)
    assert policy.threshold(0) == first


def test_a_candidate_that_takes_no_call_is_always_taken():
    policy = BreakEvenPolicy(BreakEvenSettings(target_cost=8))
    assert policy.go_on(one(1e-3, 1, free=True)) == [True]
    assert policy.go_on(one(1e-3, 2)) == [False]


def test_the_best_rate_is_that_of_the_best_constant_length():
    by_length = [sum(0.7**j for j in range(k + 1)) / (8 + k) for k in range(21)]
    assert best_rate(0.7, 8, 20) == pytest.approx(max(by_length))
    assert best_rate(0.7, 8, 1) == pytest.approx(1.7 / 9)
    assert best_rate(0.01, 8, 20) == pytest.approx(1 / 8)


def test_without_a_profile_the_cost_is_asked_for_in_one_line():
    with pytest.raises(UserError, match="target_cost: profile: there is no profile here"):
        BreakEvenPolicy(BreakEvenSettings()).threshold(0)
