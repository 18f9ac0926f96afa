"""A race by prompt set, and adaptive draft lengths against the best fixed one."""

from __future__ import annotations

from typing import Any

import pytest

from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.evidence.bench.lengths import ALL, length_leads, lengths_frame
from specdec_core.evidence.bench.result import BenchResult, Effort
from specdec_core.evidence.bench.sets import by_set, sets_frame
from tests.specdec_core.evidence.bench.test_result import row

SETS = ["chat", "gsm8k", None, "coding"] * 2  # as a mixture's prompts come, in turns


def policed(name: str, seconds: list[float], draft: str | None = None, **policy: Any) -> Any:
    """A chain's row, whose every take drafted 3 candidates in 2 rounds and half a second."""
    configuration = Configuration(drafter=DraftModelSettings(draft=draft, policy=policy))
    own = row(name, "specdec", seconds, configuration=configuration)
    parts = {"draft_forward": 0.4, "policy": 0.1}
    for take in own.takes[0]:
        take.effort = Effort(seconds=parts, widths={2: 1, 3: 1}, drafted=3, accepted=1)
    return own


def race(template: BenchResult) -> BenchResult:
    """K = 2 is the best fixed length on chat, K = 4 elsewhere and on all."""
    rows = [
        row("autoregressive", "specdec", [2.0] * 8, autoregressive=True),
        row("theirs", "vllm", [1.0, 4.0, 4.0, 4.0] * 2),
        policed("K=2", [1.0, 2.0, 2.0, 2.0] * 2, kind="fixed", max_tokens=2),
        policed("K=4", [1.5, 1.0, 1.0, 1.0] * 2, kind="fixed", max_tokens=4),
        policed("SVIP", [0.5, 1.0, 0.8, 1.0] * 2, kind="svip", threshold=0.5),
        # Nothing fixed to compare with:
        policed("other draft", [0.1] * 8, draft="small", kind="svip", threshold=0.5),
    ]
    changes = {"rows": rows, "ids": [*map(str, range(8))], "categories": SETS}
    return template.model_copy(update={**changes, "oracles": [], "forwards": {}, "repeats": 1})


def test_a_race_falls_into_its_prompt_sets(bench_result: BenchResult) -> None:
    result = race(bench_result)
    parts = by_set(result)
    assert [*parts] == ["chat", "gsm8k", "other", "mt_bench"]
    assert parts["chat"].ids == ["0", "4"]
    frame = sets_frame(result)
    assert (frame["prompts"] == 2).all()
    speeds = frame.pivot(index="contestant", columns="set", values="tokens_per_second")
    assert speeds.loc["SVIP", "chat"] == pytest.approx(10 / 0.5)
    assert speeds.loc["SVIP", "other"] == pytest.approx(10 / 0.8)
    over = frame.pivot(index="contestant", columns="set", values="over_vllm")
    assert over.loc["autoregressive", "chat"] == pytest.approx(0.5)
    assert over.loc["autoregressive", "gsm8k"] == pytest.approx(2.0)
    one = result.model_copy(update={"categories": [None] * 8})
    assert not by_set(one)
    assert not len(sets_frame(one))


def test_an_adaptive_length_is_held_against_the_fixed_one_that_is_best_on_the_same_prompts(
    bench_result: BenchResult,
) -> None:
    frame = lengths_frame(race(bench_result), 0.0).set_index(["set", "contestant"])
    assert {*frame.index.get_level_values("contestant")} == {"K=2", "K=4", "SVIP"}
    assert frame.loc[("chat", "SVIP"), "best_fixed"] == "K=2"
    assert frame.loc[("chat", "SVIP"), "over_fixed"] == pytest.approx(2.0)
    assert frame.loc[("gsm8k", "SVIP"), "best_fixed"] == "K=4"
    assert frame.loc[("gsm8k", "SVIP"), "over_fixed"] == pytest.approx(1.0)
    whole = frame.loc[ALL]
    assert whole.loc["K=4", "over_fixed"] == 1
    assert whole.loc["K=2", "over_fixed"] == pytest.approx(4.5 / 7)
    svip = whole.loc["SVIP"]
    assert svip["over_fixed_low"] < svip["over_fixed"] == pytest.approx(4.5 / 3.3)
    assert (svip["drafted"], svip["accepted"]) == (1.5, 0.5)
    assert svip["drafting"] == pytest.approx(0.5 / (3.3 / 4))


def test_both_lengths_are_chosen_on_other_prompts_than_they_are_compared_on(
    bench_result: BenchResult,
) -> None:
    (lead,) = length_leads(race(bench_result), 0.0)
    assert (lead.ours, lead.theirs, lead.held_out, lead.prompts) == ("SVIP", "K=4", True, 4)
    assert lead.ratio == pytest.approx(1.0)  # of the prompts that chose, 2.5 / 1.3
    alone = race(bench_result)
    alone.rows[:] = [own for own in alone.rows if own.name != "SVIP"]
    assert not [*length_leads(alone, 0.0)]
    assert not len(lengths_frame(alone, 0.0))
