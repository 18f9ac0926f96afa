"""Spec-Bench's questions come in, its answers go out, and the figures are its script's."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from specdec_core.base.errors import UserError
from specdec_core.evidence.bench.result import BenchResult
from specdec_core.evidence.bench.spec_bench import (
    answers,
    dump,
    read_answers,
    speed,
    task_of,
    tasks_of,
)
from specdec_core.prompts.prompt_sets import Prompt, load_prompts


def answer(category: str, tokens: list[int], seconds: list[float], accepted: list[int]) -> dict:
    choice = {
        "index": 0,
        "turns": ["text"] * len(tokens),
        "decoding_steps": [1] * len(tokens),
        "new_tokens": tokens,
        "wall_time": seconds,
        "accept_lengths": accepted,
    }
    return {"question_id": 1, "category": category, "model_id": "m", "choices": [choice]}


OWN = [
    answer("writing", [10, 20], [1.0, 1.0], [2, 4]),  # 15 tokens/s
    answer("coding", [40], [1.0], [6]),  # 40
    answer("qa", [5], [1.0], [1, 1, 1, 1, 1]),  # 5
]
BASELINE = [
    answer("writing", [10, 20], [2.0, 1.0], [1] * 30),  # 10
    answer("coding", [10], [1.0], [1] * 10),  # 10
    answer("qa", [10], [1.0], [1] * 10),  # 10
]


def test_the_figures_are_those_of_the_script() -> None:
    """Means over questions of tokens a second, not of all tokens over all seconds; accepted tokens
    over all forwards."""
    overall = speed(OWN, BASELINE)
    assert overall.tokens_per_second == pytest.approx((15 + 40 + 5) / 3)
    assert overall.speedup == pytest.approx(20 / 10)
    assert overall.mean_accepted == pytest.approx((2 + 4 + 6 + 5) / 8)
    mt_bench = speed(OWN, BASELINE, "mt_bench")
    assert mt_bench.tokens_per_second == pytest.approx(27.5)
    assert mt_bench.mean_accepted == pytest.approx(4)
    assert speed(OWN, None).speedup != speed(OWN, None).speedup  # NaN
    assert math.isnan(speed(OWN, BASELINE, "rag").tokens_per_second)


def test_mt_benchs_categories_are_one_task() -> None:
    assert task_of("humanities") == "mt_bench"
    assert tasks_of(["qa", "stem", "math", "rag"]) == ["qa", "mt_bench", "rag", "overall"]


def test_questions_keep_their_category_and_turns(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text(
        json.dumps({"question_id": 81, "category": "writing", "turns": ["One.", "Two."]})
    )
    assert load_prompts(str(path)) == [Prompt("81", "One.", "writing", ("One.", "Two."))]
    path.write_text(json.dumps({"question_id": 81, "category": "writing", "turns": ["One.", 2]}))
    with pytest.raises(UserError, match=r"question\.jsonl:1: turns: expected texts \(got 2\)"):
        load_prompts(str(path))


def test_answers_are_read_as_they_were_written(bench_result: BenchResult, tmp_path: Path) -> None:
    own = bench_result.rows[1]
    written = answers(bench_result, own, 0, lambda tokens: " ".join(map(str, tokens)))
    path = tmp_path / "answers.jsonl"
    path.write_text(dump(written))
    assert read_answers(path) == written
    assert [a["question_id"] for a in written] == [0, 1, 2]
    assert [a["category"] for a in written] == ["writing", "qa", "math"]
    for record, take in zip(written, own.takes[0], strict=True):
        (choice,) = record["choices"]
        assert choice["wall_time"] == take.seconds
        assert choice["turns"] == [" ".join(map(str, take.outputs[0]))]
        assert sum(choice["accept_lengths"]) == choice["new_tokens"][0]
        assert choice["decoding_steps"] == [len(choice["accept_lengths"])]
    assert speed(written).mean_accepted == pytest.approx(
        sum(t.tokens for t in own.takes[0]) / sum(len(t.accepted) for t in own.takes[0])
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"no answers in it"),
        ('{"category": "qa"}', r":1: not an answer of Spec-Bench"),
        (json.dumps(answer("qa", [3], [0.0], [])), r":1: not an answer of Spec-Bench"),
        ("{", r":1: malformed JSON"),
    ],
)
def test_a_file_that_holds_no_answers_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_answers(path)
