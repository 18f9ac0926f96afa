"""Spec-Bench's answer files and the definitions of its speed script.

Questions are read by :func:`specdec_core.prompts.prompt_sets.load_prompts` (question_id, category,
turns).
Answers are written so that Spec-Bench's `evaluation/speed.py` reads them, one file a contestant
and repeat. The definitions are that script's, with two differences: a baseline's tokens are those
that it reports, where the script tokenises its text again and subtracts one a turn (for a token
that Llama's tokenizer puts first, and others do not); and a question that took no time is an error
instead of a division by zero.
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
from specdec_core.prompts.prompt_sets import file_records
from specdec_core.studies.bench.result import BenchResult, Row

OVERALL = "overall"
MT_BENCH = "mt_bench"
# The script counts MT-Bench's categories as one task.
_OF_MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)

Answer = dict[str, Any]


@dataclass(frozen=True)
class Speed:
    """What the script prints for a task: the mean over questions of tokens/s, the mean over all
    target forwards of the tokens they added (NaN where nobody tells), and the ratio of the first
    to the baseline's (NaN without one)."""

    tokens_per_second: float
    mean_accepted: float
    speedup: float


def task_of(category: str) -> str:
    """The task that a category is counted to."""
    return MT_BENCH if category in _OF_MT_BENCH else category


def tasks_of(categories: Sequence[str]) -> list[str]:
    """The tasks there are, "overall" last."""
    return [*dict.fromkeys(map(task_of, categories)), OVERALL]


def answers(
    result: BenchResult,
    row: Row,
    repeat: int,
    decode: Callable[[list[int]], str] = lambda tokens: "",
) -> list[Answer]:
    """A repeat of a row as Spec-Bench's records, one a question; `decode` makes text of tokens."""
    found = []
    for number, take in enumerate(row.takes[repeat]):
        id = result.ids[number]
        found.append(
            {
                "question_id": int(id) if id.isdigit() else id,
                "category": result.categories[number] or "",
                "model_id": _model_id(row),
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
        )
    return found


def _model_id(row: Row) -> str:
    return f"{row.group}: {row.name}, temperature {row.temperature:g}"


def write_answers(result: BenchResult, folder: Path, decode: Callable[[list[int]], str]) -> None:
    """Write the answer files, one a row and repeat, below `<folder>/spec_bench`, where the prompts
    have categories."""
    for number, row in enumerate(result.rows if any(result.categories) else ()):
        name = f"{number:02}-{row.group}-{plain_name(row.name)}-T{row.temperature:g}.jsonl"
        for repeat in range(result.repeats):
            path = folder / "spec_bench" / f"run_{repeat + 1}" / name
            write_atomically(path, dump(answers(result, row, repeat, decode)))


def dump(found: Sequence[Answer]) -> str:
    """Answers as JSONL."""
    return "".join(json.dumps(answer) + "\n" for answer in found)


def read_answers(path: Path) -> list[Answer]:
    """Read an answer file of Spec-Bench; raises :class:`UserError` that names file and line."""
    found = []
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
        found.append(record)
    if not found:
        raise UserError(f"{path}: no answers in it")
    return found


def speed(
    found: Sequence[Answer], baseline: Sequence[Answer] | None = None, task: str = OVERALL
) -> Speed:
    """The script's figures for a task; NaN where it has no answers."""
    own = _rates(found, task)
    other = _rates(baseline, task) if baseline is not None else []
    accepted = [n for a in found if _belongs(a, task) for n in a["choices"][0]["accept_lengths"]]
    mean = float(np.mean(own)) if own else math.nan
    return Speed(
        tokens_per_second=mean,
        mean_accepted=float(np.mean(accepted)) if accepted else math.nan,
        speedup=mean / float(np.mean(other)) if other else math.nan,
    )


def tasks_frame(result: BenchResult, baseline: Sequence[Answer] | None = None) -> pd.DataFrame:
    """One row a contestant, temperature and task, over all repeats. Speedups are over `baseline`,
    unset over our autoregressive decoding at the same temperature."""
    tasks = tasks_of([category or "" for category in result.categories])
    rows = []
    for temperature in result.temperatures:
        own = result.autoregressive(temperature)
        against = baseline if baseline is not None else _all_answers(result, own) if own else None
        for row in result.at(temperature):
            found = _all_answers(result, row)
            for task in tasks:
                place = {
                    "contestant": row.name,
                    "group": row.group,
                    "temperature": temperature,
                    "task": task,
                }
                rows.append(place | asdict(speed(found, against, task)))
    return pd.DataFrame(rows)


def _all_answers(result: BenchResult, row: Row) -> list[Answer]:
    return [own for repeat in range(result.repeats) for own in answers(result, row, repeat)]


def _rates(found: Sequence[Answer], task: str) -> list[float]:
    choices = (a["choices"][0] for a in found if _belongs(a, task))
    return [sum(c["new_tokens"]) / sum(c["wall_time"]) for c in choices]


def _belongs(answer: Answer, task: str) -> bool:
    return task in (OVERALL, task_of(answer["category"]))
