"""The parts of a round are its time, nothing waits for a device more often than it must, and the
sampler sees who is at work."""

from __future__ import annotations

import sys
from time import perf_counter

import pytest
import torch

from specdec_core.config import Configuration, DrafterSettings, Sampling
from specdec_core.drafting.cascade.settings import CascadeSettings
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.hybrid import HybridSettings
from specdec_core.drafting.policies.confidence import ConfidenceSettings
from specdec_core.drafting.policies.confidence_product import ConfidenceProductSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.svip import SvipSettings
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.drafting.tree.settings import TreeSettings
from specdec_core.engine import Engine, Request
from specdec_core.measure.time_shares import FORWARDS, PARTS, beyond_forwards, sample_stacks, split
from specdec_core.models.eager import EagerRunner
from specdec_core.models.pair import Pair

CHAIN = DraftModelSettings(policy=ConfidenceProductSettings(threshold=0.3, max_tokens=5))
CASCADE = CascadeSettings(proposer=SuffixSettings(max_tokens=4))
BOTH = HybridSettings(lookup=SuffixSettings(max_tokens=6), min_match=3, otherwise=CASCADE)
TREE = TreeSettings(branching=[2, 1])
PROMPTS = [tuple(range(5, 25)), (7, 8, 9) * 6]


def requests(tokens: int = 20) -> list[Request]:
    return [Request(str(i), p, tokens, seed=i, ignore_eos=True) for i, p in enumerate(PROMPTS)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "drafter", [None, CHAIN, TREE, BOTH], ids=["none", "chain", "tree", "hybrid"]
)
def test_the_parts_of_a_round_are_its_time(
    tiny_pair: Pair, drafter: DrafterSettings | None, temperature: float
) -> None:
    configuration = Configuration(drafter=drafter, sampling=Sampling(temperature=temperature))
    generations = Engine(tiny_pair, configuration, slots=2).generate(requests())
    for r in (r for g in generations for r in g.rounds):
        parts = {part: getattr(r, name) for part, name in PARTS.items()}
        assert sum(parts.values()) == pytest.approx(r.seconds)
        assert min(parts.values()) >= 0
        assert r.draft_forward_seconds + r.policy_seconds <= r.draft_seconds
        assert r.target_forward_seconds <= r.target_seconds
        assert r.verify_seconds <= r.other_seconds
        if r.draft_forwards:
            assert min(r.draft_forward_seconds, r.policy_seconds) > 0
        assert r.target_forward_seconds > 0
    table = split(generations)
    rounds = [r for g in generations for r in g.rounds[1:]]  # the first ones read prompts
    assert list(table.index) == list(PARTS)
    assert table["seconds"].sum() == pytest.approx(sum(r.seconds for r in rounds))
    assert table["share"].sum() == pytest.approx(1)
    assert beyond_forwards(table) == pytest.approx(1 - table["share"].loc[list(FORWARDS)].sum())
    tokens = sum(len(g.tokens) - 1 for g in generations)
    assert table["per_token"].sum() * tokens == pytest.approx(
        table["per_round"].sum() * len(rounds)
    )


class Copies:
    """Counts how often Python reads numbers out of tensors: on a GPU every time is a wait."""

    READERS = ("tolist", "item", "numpy", "__float__", "__int__", "__bool__", "__index__")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._within = 0, False
        for name in self.READERS:
            monkeypatch.setattr(torch.Tensor, name, self._counting(getattr(torch.Tensor, name)))
        # What a forward does with its own inputs is the forward's affair.
        for name in ("forward", "prefill", "keep"):
            monkeypatch.setattr(EagerRunner, name, self._ignoring(getattr(EagerRunner, name)))

    def _counting(self, read):
        def counted(tensor, *args):
            if not self._within:
                self.count += 1
            return read(tensor, *args)

        return counted

    def _ignoring(self, method):
        def ignored(*args, **options):
            self._within = True
            try:
                return method(*args, **options)
            finally:
                self._within = False

        return ignored


@pytest.mark.parametrize(
    "policy",
    [
        FixedSettings(max_tokens=4),
        ConfidenceSettings(threshold=0.001, max_tokens=4),
        ConfidenceProductSettings(threshold=1e-6, max_tokens=4),
        SvipSettings(threshold=5.0, max_tokens=4),
    ],
    ids=lambda policy: policy.kind,
)
@pytest.mark.parametrize("slots", [1, 2])
def test_a_round_waits_once_for_each_drafted_token_and_once_for_the_verification(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch, policy: FixedSettings, slots: int
) -> None:
    """Greedily. What a policy reads comes with the token: to_host copies once from a GPU."""
    engine = Engine(tiny_pair, Configuration(drafter=DraftModelSettings(policy=policy)), slots)
    for request in requests(12):
        engine.add(request)
    copies = Copies(monkeypatch)
    together = torch.stack

    def on_a_gpu(*values: torch.Tensor) -> list[list[float]]:
        return together([own.double() for own in values]).tolist()

    monkeypatch.setattr("specdec_core.drafting.policies.signals.to_host", on_a_gpu)
    longest = 0
    while not engine.idle:
        copies.count = 0
        chunks = engine.step()
        forwards = [
            slot.rounds[-1].draft_forwards for slot in engine._active.values() if slot.rounds
        ]
        forwards += [c.finished.rounds[-1].draft_forwards for c in chunks if c.finished]
        assert copies.count <= max(forwards) + 1
        longest = max(longest, *forwards)
    assert longest == 4


def test_the_test_notices_a_further_wait(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch)
    probabilities = torch.tensor([0.5, 0.5])
    assert float(probabilities[0]) == probabilities.tolist()[1] == probabilities[0].item()
    assert copies.count == 3


def busy(seconds: float) -> None:
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def twice_as_long() -> None:
    busy(0.1)


def test_the_sampler_sees_who_is_at_work_and_leaves_the_interpreter_as_it_was() -> None:
    usual = sys.getswitchinterval()

    def run() -> None:
        busy(0.05)
        twice_as_long()

    stacks = sample_stacks(run)
    assert sys.getswitchinterval() == usual
    names = {stack[-1].partition(":")[2] for stack in stacks}
    assert "busy" in names
    through = [stack for stack in stacks if f"{__name__}:twice_as_long" in stack]
    assert through
    assert all(stack[0].endswith("run") for stack in stacks)


def test_an_error_comes_through_the_sampler() -> None:
    def broken() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        sample_stacks(broken)
