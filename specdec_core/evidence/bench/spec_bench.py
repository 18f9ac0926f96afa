"""Spec-Bench's answer files and the definitions of its speed script.

Questions are read by :func:`specdec_core.prompts.prompt_sets.load_prompts` (question_id, category,
turns). Answers are written so that Spec-Bench's `evaluation/speed.py` reads them, one file for each
contestant and repeat. The definitions are that script's, with two differences. A baseline's tokens
are those that it reports; the script tokenises its text again and subtracts one a turn, for a token
that only Llama's tokenizer puts first. And a question that took no time is an error, not a division
by zero.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.base.names import plain_name
from specdec_core.evidence.bench.result import BenchResult, BenchRow
from specdec_core.prompts.prompt_sets import file_records

OVERALL = "overall"
MT_BENCH = "mt_bench"
# The script's categories of MT-Bench, which it counts as one task.
_OF_MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)

Answer = dict[str, Any]


@dataclass(frozen=True)
class Speed:
    """The script's figures for a task: the mean over questions of tokens/s, the mean over all
    target forwards of the tokens they added (NaN where unknown), and the ratio of the first to the
    baseline's (NaN without one)."""

    tokens_per_second: float
    mean_accepted: float
    speedup: float


def task_of(category: str) -> str:
    """The task that a category is counted to."""
    return MT_BENCH if category in _OF_MT_BENCH else category


def tasks_of(categories: Sequence[str]) -> list[str]:
    """The categories' tasks, "overall" last."""
    return [*dict.fromkeys(map(task_of, categories)), OVERALL]


def answers(
    result: BenchResult,
    row: BenchRow,
    repeat: int,
    decode: Callable[[list[int]], str] = lambda tokens: "",
) -> list[Answer]:
    """A repeat of a row as Spec-Bench's records, one a question; `decode` turns tokens to text."""
    return [
        {
            "question_id": int(id) if id.isdigit() else id,
            "category": category or "",
            "model_id": f"{row.group}: {row.name}, temperature {row.temperature:g}",
            "choices": [
                {
                    "index": 0,
                    "turns": [decode(output) for output in take.outputs],
                    "decoding_steps": [len(turn) for turn in take.steps or ()],
                    "new_tokens": [len(output) for output in take.outputs],
                    "wall_time": take.seconds,
                    "accept_lengths": take.accepted,
                }
            ],
            "tstamp": result.started.timestamp(),
        }
        for id, category, take in zip(result.ids, result.categories, row.takes[repeat], strict=True)
    ]


def write_answers(result: BenchResult, folder: Path, decode: Callable[[list[int]], str]) -> None:
    """Write the answer files, one for each row and repeat, below `<folder>/spec_bench`, if the
    prompts have categories."""
    for number, row in enumerate(result.rows if any(result.categories) else ()):
        name = f"{number:02}-{row.group}-{plain_name(row.name)}-T{row.temperature:g}.jsonl"
        for repeat in range(result.repeats):
            path = folder / "spec_bench" / f"run_{repeat + 1}" / name
            write_atomically(path, dump(answers(result, row, repeat, decode)))


def dump(records: Sequence[Answer]) -> str:
    """Answers as JSONL."""
    return "".join(json.dumps(record) + "\n" for record in records)


def read_answers(path: Path) -> list[Answer]:
    """Read an answer file of Spec-Bench; raises :class:`UserError` that names file and line."""
    records = []
    for where, record in file_records(Path(path)):
        try:
            choice = record["choices"][0]
            ok = isinstance(record["category"], str) and len(choice["wall_time"]) == len(
                choice["new_tokens"]
            )
            ok = ok and sum(choice["wall_time"]) > 0 and sum(choice["new_tokens"]) >= 0
            iter(choice["accept_lengths"])
        except (KeyError, IndexError, TypeError):
            ok = False
        if not ok:
            raise UserError(
                f"{where}: not an answer of Spec-Bench (category, choices with wall_time above 0,"
                " new_tokens and accept_lengths)"
            )
        records.append(record)
    if not records:
        raise UserError(f"{path}: no answers in it")
    return records


def speed(
    records: Sequence[Answer], baseline: Sequence[Answer] | None = None, task: str = OVERALL
) -> Speed:
    """The script's figures for a task; NaN where it has no answers."""
    choices = _choices(records, task)
    mean = _mean([_rate(choice) for choice in choices])
    return Speed(
        tokens_per_second=mean,
        mean_accepted=_mean([n for choice in choices for n in choice["accept_lengths"]]),
        speedup=mean / _mean([_rate(choice) for choice in _choices(baseline or (), task)]),
    )


def tasks_frame(result: BenchResult, baseline: Sequence[Answer] | None = None) -> pd.DataFrame:
    """One row a contestant, temperature and task, over all repeats. Speedups are over `baseline`,
    unset over our autoregressive decoding at the same temperature."""
    tasks = tasks_of([category or "" for category in result.categories])
    rows = []
    for temperature in result.temperatures:
        ours = result.autoregressive(temperature)
        against = baseline if baseline is not None else _all_answers(result, ours) if ours else None
        for row in result.at(temperature):
            records = _all_answers(result, row)
            for task in tasks:
                place = {
                    "contestant": row.name,
                    "group": row.group,
                    "temperature": temperature,
                    "task": task,
                }
                rows.append(place | asdict(speed(records, against, task)))
    return pd.DataFrame(rows)


def _all_answers(result: BenchResult, row: BenchRow) -> list[Answer]:
    return [record for repeat in range(result.repeats) for record in answers(result, row, repeat)]


def _choices(records: Sequence[Answer], task: str) -> list[dict[str, Any]]:
    """The answers that belong to a task."""
    return [r["choices"][0] for r in records if task in (OVERALL, task_of(r["category"]))]


def _rate(choice: dict[str, Any]) -> float:
    """Tokens a second."""
    return float(sum(choice["new_tokens"]) / sum(choice["wall_time"]))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan
