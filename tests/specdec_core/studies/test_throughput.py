"""Throughput is of what was decoded while all slots were busy, of the same queues for everybody."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.cost import ForwardCost, Profile
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.by_batch import ByBatchSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.studies.batch_choice import choose_by_batch
from specdec_core.studies.throughput import (
    decode_queue,
    measure_throughput,
    queues_of,
    stops_paying,
)

PROMPTS = [tuple(range(5, 5 + n)) for n in (3, 9, 17, 30)]
CHAIN = Configuration(drafter=DraftModelSettings(policy=ByBatchSettings(tokens={1: 3, 2: 1})))


def test_the_clock_stops_where_a_slot_stays_empty(tiny_pair: Pair) -> None:
    """Two slots: 4 and 10 tokens begin, 5 follow the 4 at once, then one slot is empty."""
    lengths = (4, 10, 5)
    requests = [
        Request(str(n), prompt, length, ignore_eos=True)
        for n, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=False))
    ]
    busy, generations = decode_queue(Engine(tiny_pair, slots=2), requests)
    assert busy.tokens == 2 * (4 + 5)
    assert busy.seconds > 0
    assert [len(g.tokens) for g in generations] == list(lengths)


def test_queues_are_longer_than_the_slots_and_use_all_prompts_alike() -> None:
    found = queues_of(PROMPTS, slots=4, queues=2, new_tokens=8)
    assert found == queues_of(PROMPTS, slots=4, queues=2, new_tokens=8)
    for queue in found:
        assert len(queue) == 12
        assert all([r.tokens for r in queue].count(prompt) == 3 for prompt in PROMPTS)
    assert len(queues_of(PROMPTS, slots=1, queues=1, new_tokens=8)[0]) >= 6


class Heard(Observer):
    """Counts the steps that were announced and those that were done."""

    told = steps = 0

    def stage(self, name: str, steps: int | None = None, done: int = 0) -> None:
        self.told = steps or 0

    def step(self) -> None:
        self.steps += 1


def test_everybody_decodes_the_same_queues_at_every_number_of_slots(tiny_pair: Pair) -> None:
    heard = Heard()
    found = measure_throughput(tiny_pair, [CHAIN], PROMPTS, (2, 1), 2, 2, 6, heard)
    assert heard.steps == heard.told == 2 * 2 * 2 * 2
    table, frame = found.table(), found.frame()
    assert list(zip(table["slots"], table["configuration"], strict=True)) == [
        (slots, label) for slots in (1, 2) for label in ("autoregressive", CHAIN.label)
    ]
    assert (table["differing"] == 0).all()  # float32
    by_label = dict(iter(table.groupby("configuration")))
    alone, chain = by_label["autoregressive"], by_label[CHAIN.label]
    assert (alone["speedup"] == 1).all()
    assert (alone["mat"] == 1).all()
    assert (chain["mat"] > 1).all()
    assert (chain["low"] <= chain["speedup"]).all()
    assert (chain["speedup"] <= chain["high"]).all()
    assert len(frame) == heard.steps
    back = found.over(2, AUTOREGRESSIVE.id, CHAIN.id)
    assert back.value * chain[chain["slots"] == 2]["speedup"].item() == pytest.approx(1)
    # of what was timed: the sum over the queues of seconds a token
    own = frame[(frame["slots"] == 2) & (frame["config_id"] == CHAIN.id)]
    each = (own["seconds"] / own["tokens"]).groupby(own["queue"]).median()
    [shown] = table[(table["slots"] == 2) & (table["config_id"] == CHAIN.id)]["tokens_per_second"]
    assert abs(shown * each.mean() - 1) < 1e-9


def test_speculation_stops_paying_where_the_interval_reaches_one() -> None:
    table = pd.DataFrame(
        {
            "slots": [1, 4, 8, 16],
            "config_id": ["x"] * 4,
            "low": [1.8, 1.2, 0.98, 0.6],
            "high": [2.1, 1.4, 1.1, 0.7],
        }
    )
    assert stops_paying(table, "x") == 8
    assert stops_paying(table[:2], "x") is None


def test_without_a_draft_model_there_is_no_length_to_choose(tiny_pair: Pair) -> None:
    """As of a pair whose only draft is an EAGLE head."""
    times = Profile(
        target=ForwardCost.constant(0.1),
        drafts={},
        device="cpu",
        target_dtype="float32",
        draft_dtype="float32",
    )
    with pytest.raises(UserError, match="the pair has no draft model"):
        choose_by_batch(replace(tiny_pair, drafts={}), times, [(1, 2, 3)], (1,), 4)
