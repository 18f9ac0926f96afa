"""A benchmark by prompt set."""

from __future__ import annotations

import pytest

from specdec_core.evidence.bench.result import BenchResult
from specdec_core.evidence.bench.sets import by_set, sets_frame
from tests.specdec_core.evidence.bench.test_result import row

SETS = ["chat", "gsm8k", None, "coding"] * 2  # as a mixture's prompts come interleaved


def race(template: BenchResult) -> BenchResult:
    """The fastest row differs from prompt set to prompt set."""
    rows = [
        row("autoregressive", "specdec", [2.0] * 8, autoregressive=True),
        row("theirs", "vllm", [1.0, 4.0, 4.0, 4.0] * 2),
        row("SVIP", "specdec", [0.5, 1.0, 0.8, 1.0] * 2),
        row("other draft", "specdec", [0.1] * 8),
    ]
    changes = {"rows": rows, "ids": [*map(str, range(8))], "categories": SETS}
    return template.model_copy(update={**changes, "repeats": 1})


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
