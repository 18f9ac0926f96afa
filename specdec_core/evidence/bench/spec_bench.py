"""Spec-Bench's answer files.

Questions (question_id, category, turns) are read by
:func:`specdec_core.prompts.prompt_sets.load_prompts`. Answers are written so that Spec-Bench's
`evaluation/speed.py` reads them: one file for each contestant and repeat.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdec_core.base.files import write_atomically
from specdec_core.base.names import plain_name
from specdec_core.evidence.bench.result import BenchResult, BenchRow


def answers(
    result: BenchResult, row: BenchRow, repeat: int, decode: Callable[[list[int]], str]
) -> list[dict[str, Any]]:
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
    """Write the answer files below `<folder>/spec_bench`, if the prompts have categories."""
    for number, row in enumerate(result.rows if any(result.categories) else ()):
        name = f"{number:02}-{row.group}-{plain_name(row.name)}-T{row.temperature:g}.jsonl"
        for repeat in range(result.repeats):
            records = answers(result, row, repeat, decode)
            path = folder / "spec_bench" / f"run_{repeat + 1}" / name
            write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))
