"""The parts of a round add up to its time, and forwards have their costs."""

from itertools import cycle

import pytest
import torch

from specdec_core.config import Configuration, Placement, Sampling
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.break_even import BreakEvenSettings
from specdec_core.engine import Engine, Request, forward_costs
from specdec_core.evidence.bench.result import PARTS_OF_A_ROUND
from specdec_core.models.eager import EagerRunner
from specdec_core.models.pair import Pair
from tests.specdec_core.kinds import chain, configured

CHAIN = chain("confidence_product", threshold=0.3, max_tokens=5)
CASCADE = {"kind": "cascade", "proposer": {"kind": "suffix", "max_tokens": 4}}
BOTH = {"kind": "hybrid", "min_match": 3, "otherwise": CASCADE}
TREE = {"kind": "tree", "branching": [2, 1]}
PROMPTS = [tuple(range(5, 25)), (7, 8, 9) * 6]


def requests(tokens=20):
    return [Request(str(i), p, tokens, seed=i, ignore_eos=True) for i, p in enumerate(PROMPTS)]


@pytest.mark.parametrize(
    ("drafter", "temperature"),
    [(None, 1.0), (CHAIN, 0.0), (TREE, 1.0), (BOTH, 0.0)],
    ids=["none", "chain", "tree", "hybrid"],
)
def test_the_parts_of_a_round_are_its_time(tiny_pair, drafter, temperature):
    configuration = configured(drafter, Sampling(temperature=temperature))
    generations = Engine(tiny_pair, configuration, slots=2).generate(requests())
    for r in (r for g in generations for r in g.rounds):
        parts = [getattr(r, f"{name}_seconds") for name in PARTS_OF_A_ROUND]
        assert sum(parts) == pytest.approx(r.seconds)
        assert min(parts) >= 0
        assert r.draft_forward_seconds + r.policy_seconds <= r.draft_seconds
        assert r.target_forward_seconds <= r.target_seconds
        assert r.verify_seconds <= r.other_seconds
        if r.draft_forwards:
            assert min(r.draft_forward_seconds, r.policy_seconds) > 0
        assert r.target_forward_seconds > 0


class Copies:
    """Counts how often Python reads numbers out of tensors: on a GPU every time is a wait."""

    READERS = ("tolist", "item", "numpy", "__float__", "__int__", "__bool__", "__index__")

    def __init__(self, monkeypatch):
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
    ("drafter", "slots"),
    [
        (chain(max_tokens=4), 2),
        (chain("confidence", threshold=0.001, max_tokens=4), 1),
        (chain("confidence_product", threshold=1e-6, max_tokens=4), 2),
        (chain("svip", threshold=5.0, max_tokens=4), 2),
    ],
    ids=lambda given: given["policy"]["kind"] if isinstance(given, dict) else given,
)
def test_a_round_waits_once_for_each_drafted_token_and_once_for_the_verification(
    tiny_pair, monkeypatch, drafter, slots
):
    """Greedily. What a policy reads comes with the token: to_host copies once from a GPU."""
    engine = Engine(tiny_pair, configured(drafter), slots)
    for request in requests(12):
        engine.add(request)
    copies = Copies(monkeypatch)
    together = torch.stack

    def on_a_gpu(*values):
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


def test_the_test_notices_a_further_wait(tiny_pair, monkeypatch):
    copies = Copies(monkeypatch)
    probabilities = torch.tensor([0.5, 0.5])
    assert float(probabilities[0]) == probabilities.tolist()[1] == probabilities[0].item()
    assert copies.count == 3


EVEN = Configuration(drafter=DraftModelSettings(policy=BreakEvenSettings()))


def test_it_is_measured_once_for_all_engines_of_a_pair(tiny_pair, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = Engine(tiny_pair).priced(EVEN)
    assert not first.unpriced
    monkeypatch.setattr(forward_costs, "time_forward", lambda *_: pytest.fail("measured again"))
    assert Engine(tiny_pair).priced(EVEN) == first
    engine = Engine(tiny_pair, EVEN)
    assert engine.configuration.id == EVEN.id
    assert set(engine.target.lengths) == {0}
    found = engine.costs.known["draft"]
    assert first.drafter.policy.target_cost == found.candidates <= found.calls


def test_it_is_measured_anew_for_every_placement(tiny_pair, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parts = {"target": {"devices": 2, "split": "layers"}}, {"target": {"devices": 2}}
    for draft in (0, 1):
        for value in parts:
            placed = Placement.model_validate({**value, "draft": {"devices": draft}})
            monkeypatch.setattr(Pair, "placement", placed)
            assert Engine(tiny_pair).costs.target_cost() > 0
    assert len([*tmp_path.rglob("costs/*.json")]) == 4


def test_a_candidate_takes_a_call_and_a_place_in_the_targets_forward(
    tiny_pair, monkeypatch, tmp_path
):
    """Also on a machine on which other programs slow most forwards down."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = Engine(tiny_pair)
    took = {(True, 1): 10.0, (True, 5): 14.0, (False, 1): 2.0}
    slower = cycle([1.0, 7.0, 3.0, 9.0])

    def timed(runner, width):
        return took[runner is engine.target, width] * next(slower)

    monkeypatch.setattr(forward_costs, "time_forward", timed)
    assert engine.costs.target_cost() == 10 / 2
    assert engine.costs.target_in_candidates() == 3.33  # of 2 and (14 - 10) / 4


def test_a_cache_that_cannot_be_written_costs_a_warning(tiny_pair, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert Engine(tiny_pair).costs.target_cost() > 0
    assert "cannot be kept" in caplog.text
