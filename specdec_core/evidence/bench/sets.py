"""A benchmark by prompt set: the fastest row depends on the kind of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from specdec_core.evidence.bench.result import BenchResult, summary_frame

OTHER = "other"  # prompts without a category
MT_BENCH = "mt_bench"
# MT-Bench's categories, which Spec-Bench counts as one task.
_OF_MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)


def by_set(result: BenchResult) -> dict[str, BenchResult]:
    """The result on the prompts of each set alone, by the set's name: the category of its prompts
    (in a mixture, their source), or MT-Bench. Empty where all prompts are of one set."""
    sets = [
        MT_BENCH if category in _OF_MT_BENCH else category or OTHER
        for category in result.categories
    ]
    names = list(dict.fromkeys(sets))
    if len(names) < 2:
        return {}
    return {name: _on(result, [n for n, of in enumerate(sets) if of == name]) for name in names}


def sets_frame(result: BenchResult) -> pd.DataFrame:
    """:func:`summary_frame` of each set, with the columns `set` and `prompts`. A group's best is
    its best on the set."""
    parts = by_set(result).items()
    frames = [summary_frame(part).assign(set=name, prompts=len(part.ids)) for name, part in parts]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _on(result: BenchResult, prompts: Sequence[int]) -> BenchResult:
    """The result on some of its prompts."""
    rows = [
        row.model_copy(update={"takes": [[takes[n] for n in prompts] for takes in row.takes]})
        for row in result.rows
    ]
    ids, categories = ([of[n] for n in prompts] for of in (result.ids, result.categories))
    return result.model_copy(update={"ids": ids, "categories": categories, "rows": rows})
