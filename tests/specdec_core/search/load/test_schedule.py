"""A schedule names one configuration for every number of requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.cost.steps import ForwardTerms, StepTimes
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.models.pair import Pair
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording
from specdec_core.search.load.schedule import (
    Schedule,
    choose_schedule,
    load_schedule,
    simulate_each,
)
from tests.jobs.conftest import record_prompts


def chain(k: int) -> Configuration:
    return Configuration(
        drafter=DraftModelSettings(draft="draft", policy=FixedSettings(max_tokens=k))
    )


SIX, TWO = chain(6), chain(2)


def test_neighbours_with_one_configuration_are_one_range() -> None:
    schedule = Schedule.of({1: SIX, 2: SIX, 4: TWO, 8: AUTOREGRESSIVE, 16: AUTOREGRESSIVE})
    assert [each.up_to for each in schedule.ranges] == [2, 4, None]
    chosen = [schedule.at(n) for n in (1, 2, 3, 4, 5, 99)]
    assert chosen == [SIX, SIX, TWO, TWO, AUTOREGRESSIVE, AUTOREGRESSIVE]
    expected = "draft, K=6 up to 2, draft, K=2 up to 4, autoregressive from 5 requests on"
    assert schedule.sentence == expected


def test_a_schedule_is_saved_and_read_again(tmp_path: Path) -> None:
    schedule = Schedule.of({4: SIX, 8: AUTOREGRESSIVE})
    read = load_schedule(schedule.save(tmp_path / "schedule.yaml"))
    assert read == schedule
    assert [each.configuration.id for each in read.ranges] == [SIX.id, AUTOREGRESSIVE.id]


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([], "ranges: "),
        ([{"up_to": 4, "configuration": {}}], "the last range ends nowhere"),
        ([{"configuration": {}}, {"configuration": {}}], "only the last range has no up_to"),
        (
            [*({"up_to": n, "configuration": {}} for n in (8, 4)), {"configuration": {}}],
            "up_to must increase from range to range (it is [8, 4])",
        ),
        (
            [
                {"up_to": 2, "configuration": {}},
                {"configuration": {"sampling": {"temperature": 1.0}}},
            ],
            "all must sample alike",
        ),
        ([{"from": 3, "configuration": {}}], "ranges.0.from: unknown key"),
    ],
)
def test_a_wrong_schedule_is_one_line(
    ranges: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(json.dumps({"ranges": ranges}))
    with pytest.raises(UserError) as raised:
        load_schedule(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert message in str(raised.value)


def test_a_change_has_to_gain_something() -> None:
    rows = [
        (clients, each.id, value)
        for clients, values in {1: (100, 150, 90), 4: (200, 199.5, 201), 8: (300, 200, 250)}.items()
        for each, value in zip((AUTOREGRESSIVE, SIX, TWO), values, strict=True)
    ]
    simulated = pd.DataFrame(rows, columns=["clients", "config_id", "tokens_per_second"])
    known = [AUTOREGRESSIVE, SIX, TWO]
    assert [choose_schedule(simulated, known).at(n) for n in (1, 4, 8)] == [
        SIX,
        SIX,
        AUTOREGRESSIVE,
    ]
    eager = choose_schedule(simulated, known, tolerance=0)
    assert [eager.at(n) for n in (1, 4, 8)] == [SIX, TWO, AUTOREGRESSIVE]


def test_where_tokens_cost_more_with_load_the_schedule_stops_drafting(
    tiny_pair: Pair, tmp_path: Path
) -> None:
    prompts = tmp_path / "texts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"x{i} = {i} + "}) for i in range(4)))
    record_prompts(tiny_pair, prompts, tmp_path / "trace", 24)
    replay = Replay(Recording.open(tmp_path / "trace"), hidden=False)
    # Nearly free verification up to a dozen tokens, and then none that is free.
    target = ForwardTerms(fixed=0.01, per_token_beyond=0.003, knee=12)
    times = StepTimes(target=target, drafts={"draft": ForwardTerms(fixed=0.001)})
    simulated = simulate_each(replay, [SIX, TWO], times)
    assert set(simulated["config_id"]) == {AUTOREGRESSIVE.id, SIX.id, TWO.id}
    schedule = choose_schedule(simulated, [AUTOREGRESSIVE, SIX, TWO])
    assert schedule.at(1) != AUTOREGRESSIVE
    assert schedule.at(16) == AUTOREGRESSIVE
    by_load = simulated.set_index(["clients", "config_id"])["tokens_per_second"]
    for clients in (1, 2, 4, 8, 16):
        chosen = by_load[clients, schedule.at(clients).id]
        assert chosen >= 0.99 * by_load[clients].max()
