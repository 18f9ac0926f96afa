"""The papers' tables in our terms, as they are shown: cells, Markdown, CSV, the console."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table as RichTable

from dashboards.figures.papers import QUANTITIES
from specdec_core.search.results import Timing
from specdec_core.studies.papers.plan import Method, Quantity, Table
from specdec_core.studies.papers.result import Measured, PapersResult
from specdec_core.tokens.statistics import Ratio, paired_ratio

LESS_IS_BETTER = ("discard_rate", "verification_rate")
LEGEND = (
    "Bold: the best of its column among lossless methods; “=” before a ratio: cannot be told from "
    "the fastest (the 95 % interval of the paired ratio includes 1); “(lossy)”: the output does "
    "not keep the target's distribution."
)


class Column(NamedTuple):
    """A prompt set, a value of what the table varies, and a quantity."""

    prompts: str
    number: int  # of the value
    quantity: Quantity


class Cell(NamedTuple):
    """A method's name, or a value and, of a ratio, its interval."""

    value: str
    interval: str = ""
    best: bool = False

    @property
    def text(self) -> str:
        return f"{self.value} ({self.interval})" if self.interval else self.value


@dataclass(frozen=True)
class Sheet:
    """A table as it is shown."""

    key: str
    title: str
    caption: str
    headings: list[tuple[str, ...]]  # lines of each
    rows: list[list[Cell]]
    notes: list[str]

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Prompt sets and how many columns each has; none where headings do not name them."""
        columns = self.headings[1:]
        if any(len(heading) < 2 for heading in columns):
            return []
        return [(name, len(list(own))) for name, own in groupby(columns, key=lambda h: h[0])]

    @property
    def edges(self) -> list[int]:
        """The columns that begin a group."""
        return [*accumulate((width for _, width in self.groups), initial=1)][:-1]


def sheets(result: PapersResult) -> list[Sheet]:
    """Every table that has a prompt set left."""
    return [_sheet(result, key) for key in result.tables()]


def _sheet(result: PapersResult, key: str) -> Sheet:
    table = result.plan.tables[key]
    methods = result.plan.methods(key)
    rows = [[Cell(method.label)] for method in methods]
    for column in _columns(result, table):
        values = [_value(result, method, column) for method in methods]
        best = _best(methods, column, values)
        for row, method, value in zip(rows, methods, values, strict=True):
            row.append(_cell(result, table, method, column, value, best))
    return Sheet(
        key=key,
        title=table.title,
        caption=_caption(result, table),
        headings=[("method",), *(_heading(result, table, c) for c in _columns(result, table))],
        rows=rows,
        notes=list(table.notes),
    )


def frame(result: PapersResult, key: str) -> pd.DataFrame:
    """One row a method, prompt set and value of what the table varies: every quantity that was
    measured, the ratio's interval, the counts."""
    table = result.plan.tables[key]
    rows = []
    for method in result.plan.methods(key):
        for number, configuration in enumerate(method.configurations):
            for prompts in result.sets_of(table):
                found = result.find(prompts, configuration)
                if found is None:
                    continue
                timing = found.timing
                rows.append(
                    {
                        "method": method.label,
                        "prompts": prompts,
                        **({table.varied: table.values[number]} if table.varied else {}),
                        "temperature": configuration.sampling.temperature,
                        "lossless": configuration.lossless,
                        **{name: found.metrics.get(name, math.nan) for name in QUANTITIES},
                        "speedup_low": timing.low if timing else math.nan,
                        "speedup_high": timing.high if timing else math.nan,
                        "differing_outputs": timing.differing_outputs if timing else math.nan,
                        **found.counts,
                        "configuration": configuration.label,
                        "config_id": configuration.id,
                    }
                )
    return pd.DataFrame(rows)


def markdown(sheet: Sheet) -> str:
    """A table as Markdown."""
    lines = [f"## {sheet.title}", "", sheet.caption, ""]
    numeric = " ---: |" * (len(sheet.headings) - 1)
    lines += [_pipe([" ".join(own) for own in sheet.headings]), f"| --- |{numeric}"]
    lines += [
        _pipe([f"**{cell.text}**" if cell.best else cell.text for cell in row])
        for row in sheet.rows
    ]
    lines += ["", *(f"- {note}" for note in sheet.notes)]
    return "\n".join(lines).rstrip() + "\n"


def console_table(sheet: Sheet, most: int = 6) -> RichTable:
    """A table for the console, without intervals; of each prompt set the ratio and as many other
    quantities as fit into `most` columns."""
    table = RichTable(
        title=sheet.title,
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    quantities = list(dict.fromkeys(heading[-1] for heading in sheet.headings[1:]))
    if len(sheet.headings) - 1 > most and sheet.groups:
        ratio = QUANTITIES["speedup"][0]
        quantities.sort(key=lambda name: name != ratio)
        quantities = quantities[: max(most // len(sheet.groups), 1)]
        table.caption = "more columns in papers.md"
    shown = [i for i, own in enumerate(sheet.headings) if i == 0 or own[-1] in quantities]
    for i in shown:
        heading = "\n".join(sheet.headings[i])
        table.add_column(heading, justify="right" if i else "left", no_wrap=i > 0, min_width=6)
    for row in sheet.rows:
        cells = [row[i] for i in shown]
        table.add_row(*(f"[bold]{cell.value}[/]" if cell.best else cell.value for cell in cells))
    return table


def _columns(result: PapersResult, table: Table) -> list[Column]:
    return [
        Column(prompts, number, quantity)
        for prompts in result.sets_of(table)
        for number in range(len(table.values))
        for quantity in table.columns
    ]


def _found(result: PapersResult, method: Method, column: Column) -> Measured | None:
    return result.find(column.prompts, method.configurations[column.number])


def _value(result: PapersResult, method: Method, column: Column) -> float:
    configuration = method.configurations[column.number]
    return result.value(column.prompts, configuration, column.quantity)


def _best(methods: Sequence[Method], column: Column, values: Sequence[float]) -> Method | None:
    """The best lossless method of a column; none where there is nothing to choose from."""
    known = [
        (value, method)
        for value, method in zip(values, methods, strict=True)
        if method.lossless and not math.isnan(value)
    ]
    if len(known) < 2:
        return None
    choose = min if column.quantity in LESS_IS_BETTER else max
    return choose(known, key=lambda own: own[0])[1]


def _cell(
    result: PapersResult,
    table: Table,
    method: Method,
    column: Column,
    value: float,
    best: Method | None,
) -> Cell:
    if math.isnan(value):
        return Cell("–")
    text = QUANTITIES[column.quantity][1].format(value)
    found = _found(result, method, column)
    timing = found.timing if found else None
    if column.quantity != "speedup" or timing is None or timing.low == timing.high:
        return Cell(text, best=method is best)
    if best is not None and method is not best:
        fastest = _found(result, best, column)
        if fastest and fastest.timing and over(fastest.timing, timing).tied:
            text = "=" + text
    interval = "" if table.varied else f"{timing.low:.2f}–{timing.high:.2f}"
    return Cell(text, interval, method is best)


def _heading(result: PapersResult, table: Table, column: Column) -> tuple[str, ...]:
    parts = []
    if len(result.sets_of(table)) > 1:
        parts.append(column.prompts)
    if table.varied:
        parts.append(f"{table.varied} = {table.values[column.number]}")
    if len(table.columns) > 1 or not parts:
        parts.append(QUANTITIES[column.quantity][0])
    return tuple(parts)


def _caption(result: PapersResult, table: Table) -> str:
    """Whose table it is, on what, and what its columns say."""
    temperatures = ", ".join(f"{t:g}" for t in table.temperatures)
    sets = ", ".join(f"{name} ({result.sets[name].count})" for name in result.sets_of(table))
    columns = "; ".join(
        f"{QUANTITIES[quantity][0]}: {QUANTITIES[quantity][2]}" for quantity in table.columns
    )
    drafts = [*result.pair.drafts]
    draft = "" if table.each_draft or not drafts else f", draft {drafts[0]}"
    return f"{table.paper}. {sets} prompts, temperature {temperatures}{draft}. {columns}."


def _pipe(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '∣') for cell in cells)} |"


def over(timing: Timing, baseline: Timing) -> Ratio:
    """How many times faster `timing` is than `baseline`, on the same prompts in the same repeats;
    where their outputs differ in length, for the same number of tokens."""
    lengths = np.array(baseline.tokens) / np.maximum(timing.tokens, 1)
    repeats = min(len(timing.seconds), len(baseline.seconds))
    ours, theirs = (np.array(t.seconds[:repeats]) for t in (timing, baseline))
    return paired_ratio(theirs, ours * lengths)
