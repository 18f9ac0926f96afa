"""Answers are judged by what they say, and a target that knows none judges nobody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from research.drift.graded import LEAST, on_answers
from research.drift.sandbox import check_sandbox
from research.drift.tasks import GradedTask, last_number, load_task, program_of
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.target_started.settings import TargetTreeSettings
from specdec_core.models.pair import Pair
from specdec_core.prompts.prompt_sets import Prompt

RECORD = {
    "task_id": "HumanEval/0",
    "prompt": 'from math import sqrt\n\ndef root(x):\n    """Its root."""\n',
    "entry_point": "root",
    "test": "def check(candidate):\n    assert candidate(9) == 3\n",
}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12 - 4 = 8, so she makes $1,018.50.", 1018.5),
        ("the answer is -3", -3.0),
        ("#### 18", 18.0),
        ("none", None),
    ],
)
def test_the_last_number_is_the_answer(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_exact_match_compares_with_what_stands_behind_the_mark(tmp_path: Path) -> None:
    file = tmp_path / "gsm8k.jsonl"
    file.write_text(json.dumps({"question": "2 + 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}))
    task = load_task(file, None, None, "auto")
    [judge] = task.judges
    assert task.measure == "exact match"
    assert judge("That makes 4.")
    assert not judge("4 is not 5")
    file.write_text(json.dumps({"question": "2 + 2?", "answer": "four"}))
    with pytest.raises(UserError, match=r"gsm8k\.jsonl:1: expected a number behind ####"):
        load_task(file, None, None, "auto")
    file.write_text(json.dumps({"prompt": "x"}))
    with pytest.raises(UserError, match="no answers to judge"):
        load_task(file, None, None, "auto")


def run(text: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(f"{program_of(RECORD, text)}\n{RECORD['test']}", "program", "exec"), names)
    names["check"](names["root"])


def test_a_program_is_what_completes_the_function_or_stands_in_a_block() -> None:
    run("    return sqrt(x)\nprint(no_such_name)\n")
    run("Here:\n```python\ndef root(x):\n    return sqrt(x)\n```\nThat is all.")
    with pytest.raises(AssertionError):
        run("    return x\n")
    with pytest.raises(AssertionError):
        run("```python\ndef root(x):\n    return 1\n```")


def test_tests_may_call_what_the_prompt_has_before_the_function(tmp_path: Path) -> None:
    try:
        check_sandbox()
    except UserError as error:
        pytest.skip(str(error))
    prompt = f"def square(x):\n    return x * x\n\n{RECORD['prompt']}"
    test = "def check(candidate):\n    assert square(candidate(9)) == 9\n"
    file = tmp_path / "humaneval.jsonl"
    file.write_text(json.dumps({**RECORD, "prompt": prompt, "test": test}))
    [judge] = load_task(file, None, None, "auto").judges
    assert judge("    return sqrt(x)\nprint(no_such_name)\n")
    assert judge("```python\ndef root(x):\n    return sqrt(x)\n```")
    assert not judge("    return x\n")


def test_right_answers_are_counted_where_the_target_gives_some(tiny_pair: Pair) -> None:
    prompts = [Prompt(str(n), f"x = {n}") for n in range(6)]
    drafter = TargetTreeSettings(draft="draft", branching=(2, 1))
    tree = Configuration(drafter=drafter, sampling=Sampling(temperature=1.0))
    for judge, rows in ((lambda text: len(text) > 0, 2), (lambda text: False, 1)):
        task = GradedTask("Words", "written", prompts, [judge] * len(prompts))
        table = on_answers(tiny_pair, [tree], tree.sampling, task, 2, 4)
        assert len(table) == rows
        assert (table["right"][0] >= LEAST) == (rows == 2)
    assert list(on_answers(tiny_pair, [tree], tree.sampling, task, 2, 4)["change"]) == [None]
