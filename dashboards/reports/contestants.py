"""Who took part in a benchmark, and on which models."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Protocol

import pandas as pd

from dashboards import cells
from dashboards.sections import Section
from specdec_core.config import PairSpec


class Described(Protocol):
    """A row of any benchmark."""

    name: str
    group: str
    version: str
    settings: dict[str, Any]


def contestants(rows: Iterable[Described]) -> Section:
    """Versions and settings of everybody, each once."""
    frame = pd.DataFrame(
        {
            "contestant": row.name,
            "group": row.group,
            "version": row.version,
            "settings": json.dumps(row.settings, ensure_ascii=False),
        }
        for row in {(row.group, row.name): row for row in rows}.values()
    )
    columns = {name if name != "contestant" else "": cells.text(name) for name in frame.columns}
    return Section(
        key="contestants",
        title="Who took part",
        frame=frame,
        shown=cells.table(frame, columns),
        style="long",
        on_console=False,
    )


def models(pair: PairSpec) -> str:
    """The pair's models, their data types, the device and the threads."""
    runner = pair.runner
    drafts = ", ".join(f"{name} = {model}" for name, model in pair.drafts.items()) or "none"
    return (
        f"target {pair.target} ({runner.target_dtype}), drafts {drafts} ({runner.draft_dtype});"
        f" {runner.device}, threads {runner.threads}"
    )
