"""GSM8K and HumanEval: prompts with answers that can be judged."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from research.drift.sandbox import check_sandbox, passes
from specdec_core.base.errors import UserError
from specdec_core.prompts.prompt_sets import Prompt, file_records, load_prompts

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_BLOCK = re.compile(r"```(?:python|py)?\n(.*?)(?:```|\Z)", re.DOTALL)
# A function's text ends where the next statement at its level begins (Chen et al., 2021).
_ENDS = re.compile(r"\n(?=\S)")

Judge = Callable[[str], bool]


@dataclass(frozen=True)
class GradedTask:
    """Prompts, and for each whether a text is a right answer. `measure` is what the share of right
    answers is called."""

    name: str
    measure: str
    prompts: list[Prompt]
    judges: list[Judge]


def load_task(path: Path, limit: int | None, tokenizer: Any, chat_template: str) -> GradedTask:
    """The task in a JSONL file of GSM8K or HumanEval. Raises :class:`UserError` for another file,
    and for programs where there is no sandbox to run them in."""
    records = list(islice(file_records(path), limit))
    prompts = load_prompts(str(path), limit, tokenizer, chat_template)
    keys = records[0][1].keys() if records else ()
    if {"question", "answer"} <= set(keys):
        judges = [_exact(record, where) for where, record in records]
        return GradedTask("GSM8K", "exact match", prompts, judges)
    if {"prompt", "test", "entry_point"} <= set(keys):
        check_sandbox()
        return GradedTask(
            "HumanEval", "pass@1", prompts, [_passing(record) for _, record in records]
        )
    raise UserError(
        f"{path}: no answers to judge; expected GSM8K (question, answer) or HumanEval"
        " (prompt, test, entry_point)"
    )


def last_number(text: str) -> float | None:
    """The last number in a text; None where there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _exact(record: dict[str, Any], where: str) -> Judge:
    """Whether the last number is the answer's, which stands behind `####`."""
    expected = last_number(record["answer"].rpartition("####")[2])
    if expected is None:
        raise UserError(f"{where}: expected a number behind #### in answer")

    def judge(text: str) -> bool:
        return last_number(text) == expected

    return judge


def _passing(record: dict[str, Any]) -> Judge:
    """Whether the function that the text completes, or has in a block of code, passes its tests."""
    # Tests may call the functions that the prompt has before the one to be written.
    tests = f"{record['prompt']}    pass\n\n{record['test']}"

    def judge(text: str) -> bool:
        return passes(program_of(record, text), record["entry_point"], tests)

    return judge


def program_of(record: dict[str, Any], text: str) -> str:
    """The program that a text makes of a HumanEval record."""
    block = _BLOCK.search(text)
    if block is not None and f"def {record['entry_point']}" in block[1]:
        return f"{record['prompt']}    pass\n\n{block[1]}"
    return str(record["prompt"] + _ENDS.split(text, maxsplit=1)[0])
