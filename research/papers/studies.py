"""Figures and tables of the papers that are computed from recordings and decoded texts.

A study is a function of inputs that returns a table. Inputs have names: each of the plan's
recordings (a :class:`specdec_core.recordings.schema.Recording` for each prompt set), `pair` (of the
tables, its EAGLE heads included), `times` (the forward times of this machine, a
:class:`specdec_core.cost.Profile`), `own_heads` (the plan's trained heads by name), `long_form` and
`long_form_greedy` (:class:`research.long_form.study.LongForm`). A study's table is written
whole once it is computed, and read again for the same study and inputs. An input is made only
if a study needs it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from specdec_core.base.errors import UserError
from specdec_core.base.files import atomic_path
from specdec_core.base.observer import Observer

# Inputs beside the recordings.
PAIR, TIMES, OWN_HEADS, LONG_FORM = "pair", "times", "own_heads", "long_form"
LONG_FORM_GREEDY = f"{LONG_FORM}_greedy"


@dataclass(frozen=True)
class Input:
    """What a study is computed from. `digest` names the content, which `load` gets."""

    digest: str
    load: Callable[[], Any]

    @cached_property
    def value(self) -> Any:
        return self.load()


@dataclass(frozen=True)
class Study:
    """A figure or table of a paper. `measure` gets the inputs that `needs` names, in that order.
    `version` goes up when `measure` computes something else."""

    key: str
    needs: tuple[str, ...]
    measure: Callable[..., pd.DataFrame]
    version: int = field(default=1, kw_only=True)

    def digest(self, inputs: Sequence[Input]) -> str:
        content = json.dumps([self.key, self.version, *(each.digest for each in inputs)])
        return hashlib.sha256(content.encode()).hexdigest()


def study_tables(
    studies: Iterable[Study],
    inputs: Mapping[str, Input],
    folder: Path,
    fresh: bool = False,
    observer: Observer | None = None,
) -> dict[str, pd.DataFrame]:
    """The studies' tables by key, from `<folder>/<key>-<digest>.parquet` or, `fresh` or where that
    is missing, computed and written. A study that lacks an input, cannot do with it (a
    :class:`UserError`) or finds nothing in it is left out with a warning."""
    observer = observer or Observer()
    tables = {}
    for study in studies:
        if missing := [name for name in study.needs if name not in inputs]:
            observer.warned(f"{study.key} is left out: no {', '.join(missing)}")
            continue
        needed = [inputs[name] for name in study.needs]
        file = folder / f"{study.key}-{study.digest(needed)[:8]}.parquet"
        if fresh or not file.exists():
            try:
                values = [each.value for each in needed]  # may be stages of their own
                observer.stage(f"computing {study.key}")
                table = study.measure(*values)
            except UserError as error:
                observer.warned(f"{study.key} is left out: {error}")
                continue
            with atomic_path(file) as path:
                table.to_parquet(path, index=False, compression="zstd")
        table = pd.read_parquet(file)
        if table.empty:
            observer.warned(f"{study.key} is left out: its inputs are too small")
        else:
            tables[study.key] = table
    return tables
