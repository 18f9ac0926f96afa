"""A benchmark by prompt set: the fastest row depends on the kind of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from specdec_core.evidence.bench.result import BenchResult, summary_frame
from specdec_core.evidence.bench.spec_bench import task_of

OTHER = "other"  # prompts without a category


def by_set(result: BenchResult) -> dict[str, BenchResult]:
    """The race on the prompts of each set alone, by the set's name: a prompt's category, which of
    a mixture is its source, and MT-Bench's as one. Empty where all prompts are of one set."""
    sets = [task_of(category or OTHER) for category in result.categories]
    names = list(dict.fromkeys(sets))
    if len(names) < 2:
        return {}
    return {name: _on(result, [n for n, of in enumerate(sets) if of == name]) for name in names}


def sets_frame(result: BenchResult) -> pd.DataFrame:
    """:func:`summary_frame` of each set, with the columns `set` and `prompts`; a group's best is
    that on the set."""
    parts = by_set(result).items()
    frames = [summary_frame(part).assign(set=name, prompts=len(part.ids)) for name, part in parts]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _on(result: BenchResult, prompts: Sequence[int]) -> BenchResult:
    """The race on some of its prompts. The oracle is known for all of them only."""
    rows = [
        row.model_copy(update={"takes": [[takes[n] for n in prompts] for takes in row.takes]})
        for row in result.rows
    ]
    ids, categories = ([of[n] for n in prompts] for of in (result.ids, result.categories))
    changes = {"ids": ids, "categories": categories, "rows": rows, "oracles": []}
    return result.model_copy(update=changes)
