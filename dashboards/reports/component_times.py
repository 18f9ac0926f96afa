"""What the parts of decoding with Post-use & Pre-cut take (its Table 9)."""

from __future__ import annotations

import pandas as pd

from dashboards import cells
from dashboards.sections import Section
from specdec_core.studies.component_times import (
    CACHE,
    CONTROLLER,
    M_D,
    M_T,
    ROLL_BACK,
    ComponentTimes,
)

PAPER = {  # Llama-2-Chat 7B and 70B on four A6000
    M_D: "21 ms",
    M_T: "152 ms",
    CACHE: "0.1 ms",
    ROLL_BACK: "2 ms",
    CONTROLLER: "< 0.1 ms",
}
COLUMNS = {
    "component": cells.text("component"),
    "paper, each": lambda row: PAPER.get(row["component"], cells.NONE),
    "here, each, ms": cells.number("each", ".3f"),
    "a round": cells.number("a_round", ".1f"),
    "share": cells.number("share", ".1%"),
}


def component_times(found: ComponentTimes) -> Section:
    """A row a component, and how much was recycled meanwhile."""
    return _section(found.table, found.counts.n, found.drafted, found.recycled, found.suffixes)


def components_of(table: pd.DataFrame) -> Section:
    """The same from one table, whose columns tokens, drafted, recycled and suffixes have one value
    each."""
    first = table.iloc[0]
    counts = (int(first[name]) for name in ("tokens", "drafted", "recycled", "suffixes"))
    return _section(table, *counts)


def _section(
    table: pd.DataFrame, tokens: int, drafted: int, recycled: int, suffixes: int
) -> Section:
    return Section(
        key="post-use-9",
        title="Latency by component (Table 9)",
        note="Live, one request at a time: milliseconds of a call, calls in a mean round, and the"
        " share of the time of all rounds but each request's first.",
        lines=[
            f"Of {drafted:,} drafted tokens, {recycled:,} ({recycled / max(drafted, 1):.0%}) were"
            f" cached phrases and took no draft call; of {tokens:,} tokens of the output,"
            f" {suffixes:,} ({suffixes / max(tokens, 1):.0%}) were cached phrases behind a draft.",
        ],
        shown=cells.table(table, COLUMNS),
        frame=table,
    )
