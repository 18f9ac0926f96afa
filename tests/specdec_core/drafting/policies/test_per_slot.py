"""Slots with policies of their own are answered as by each policy alone, by what is known of the
draft's distribution."""

import pytest
import torch

from specdec_core.drafting.arms import PerSlot
from specdec_core.drafting.policies.policy import PolicyOutcome, build_policy
from specdec_core.drafting.policies.signals import Signals
from specdec_core.models.runner import Output
from tests.specdec_core.kinds import policy

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
    for source, own in ((None, expected), (read, expected), (told, told.confidence)):
        signals = Signals([4, 5, 6], tokens, [1, 1, 1], LOGITS, None, source=source)
        signals.fetch([name])
        assert getattr(signals, name) == pytest.approx(own.tolist())
        part = Signals([4, 5, 6], tokens, [1, 1, 1], LOGITS, None, source=source).only([2, 0])
        assert getattr(part, name) == pytest.approx(own[[2, 0]].tolist())
