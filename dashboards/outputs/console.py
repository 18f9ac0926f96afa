"""Sections on the console."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dashboards import cells
from dashboards.sections import Section

NAME = 24  # characters of a text that is not broken into lines
HEADING = 12  # characters of a heading in a line, or more where the column is wider
LEAST = 8  # the same in a table that is too wide


def show(console: Console, sections: Iterable[Section]) -> None:
    """The tables, and below them the lines of sections without a table."""
    shown = [section for section in sections if section.on_console]
    for section in shown:
        if section.shown is not None:
            console.print(table(section, console.width))
    for section in shown:
        for line in section.lines if section.shown is None else ():
            console.print(line, soft_wrap=True, markup=False)


def table(section: Section, width: int = 80) -> Table:
    """A section's table, of its brief columns. To fit into `width` it may leave intervals, and then
    the last columns, to the report."""
    assert section.shown is not None
    shown, legend = section.shown, section.legend
    if section.brief:
        shown = shown[[*section.brief]]
    shown = _fitting(shown, width, section.intervals)
    if shown.shape[1] < section.shown.shape[1] and not legend:
        legend = "more columns in the report"
    grid = Table(
        title=escape(section.title) or None,
        caption=escape(legend) or None,
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    heading_width = HEADING if _width(shown, HEADING) <= width else LEAST
    for number, (heading, column) in enumerate(shown.items()):
        right = bool(number) and cells.numeric(column)
        grid.add_column(
            _wrapped(heading, max(_least(column, number), heading_width)),
            justify="right" if right else "left",
            no_wrap=right,
            min_width=_least(column, number),
        )
    places = [section.shown.columns.get_loc(heading) for heading in shown.columns]
    for number, row in enumerate(shown.itertuples(index=False)):
        texts = [
            f"[bold]{escape(cell)}[/bold]" if (number, place) in section.best else escape(cell)
            for place, cell in zip(places, row, strict=True)
        ]
        grid.add_row(
            *texts,
            style="bold" if number in section.marked else None,
            end_section=number in section.ruled,
        )
    return grid


def _fitting(shown: pd.DataFrame, width: int, intervals: bool) -> pd.DataFrame:
    """Without intervals where the table is wider with them, or without `intervals`; then without
    its last columns. Two stay."""
    if not intervals or _width(shown, LEAST) > width:
        shown = shown.map(lambda cell: cells.split(cell)[0])
    while shown.shape[1] > 2 and _width(shown, LEAST) > width:
        shown = shown.iloc[:, :-1]
    return shown


def _width(shown: pd.DataFrame, heading_width: int) -> int:
    """The width of a table with headings in lines of `heading_width`, where words are shorter."""
    columns = enumerate(shown.items())
    return sum(
        2 + max(_least(column, number), *map(len, _wrapped(heading, heading_width).split("\n")))
        for number, (heading, column) in columns
    )


def _least(column: pd.Series, number: int) -> int:
    """Characters that a column needs: all of a number, and of a text a name's."""
    longest = max(map(len, column), default=0)
    return longest if number and cells.numeric(column) else min(longest, NAME)


def _wrapped(heading: Any, width: int) -> str:
    parts = heading if isinstance(heading, tuple) else (heading,)
    lines = [wrap(part, width, break_long_words=False) for part in parts if part]
    return "\n".join(line for part in lines for line in part)
