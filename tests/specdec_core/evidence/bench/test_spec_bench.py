"""Spec-Bench's questions are read, and its answer files written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec_core.base.errors import UserError
from specdec_core.evidence.bench.result import BenchResult
from specdec_core.evidence.bench.spec_bench import write_answers
from specdec_core.prompts.prompt_sets import Prompt, load_prompts


def test_questions_keep_their_category_and_turns(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text(
        json.dumps({"question_id": 81, "category": "writing", "turns": ["One.", "Two."]})
    )
    assert load_prompts(str(path)) == [Prompt("81", "One.", "writing", ("One.", "Two."))]
    path.write_text(json.dumps({"question_id": 81, "category": "writing", "turns": ["One.", 2]}))
    with pytest.raises(UserError, match=r"question\.jsonl:1: turns: expected texts \(got 2\)"):
        load_prompts(str(path))


def test_answers_are_what_its_script_reads(bench_result: BenchResult, tmp_path: Path) -> None:
    write_answers(bench_result, tmp_path, lambda tokens: " ".join(map(str, tokens)))
    (path,) = (tmp_path / "spec_bench" / "run_1").glob("01-*.jsonl")
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [a["question_id"] for a in written] == [0, 1, 2]
    assert [a["category"] for a in written] == ["writing", "qa", "math"]
    for record, take in zip(written, bench_result.rows[1].takes[0], strict=True):
        (choice,) = record["choices"]
        assert choice["wall_time"] == take.seconds
        assert choice["turns"] == [" ".join(map(str, take.outputs[0]))]
        assert sum(choice["accept_lengths"]) == choice["new_tokens"][0]
        assert choice["decoding_steps"] == [len(choice["accept_lengths"])]
