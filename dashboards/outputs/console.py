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

WIDTHS = (80, 16, 12, 8)  # of headings, the first with which a table fits
NAME = 24  # characters of a text that is not broken into lines


def show(console: Console, sections: Iterable[Section]) -> None:
    """The tables, and below them the lines of what has no table."""
    shown = [section for section in sections if section.on_console]
    for section in shown:
        if section.shown is not None:
            console.print(table(section, console.width))
    for section in shown:
        for line in section.lines if section.shown is None else ():
            console.print(line, soft_wrap=True, markup=False)


def table(section: Section, width: int = 80) -> Table:
    """A section's table, of its brief columns. As far as `width` asks, headings are wrapped, and
    intervals and then the last columns are left to the report."""
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
    for number, heading in enumerate(_headings(shown, width)):
        column = shown.iloc[:, number]
        right = bool(number) and cells.numeric(column)
        grid.add_column(
            heading,
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
    if not intervals or _narrowest(shown) > width:
        shown = shown.map(lambda cell: cells.split(cell)[0])
    while shown.shape[1] > 2 and _narrowest(shown) > width:
        shown = shown.iloc[:, :-1]
    return shown


def _narrowest(shown: pd.DataFrame) -> int:
    """The width of a table whose headings are wrapped as far as words allow."""
    headings = [_wrapped(heading, WIDTHS[-1]).split("\n") for heading in shown.columns]
    wide = [max(map(len, lines)) for lines in headings]
    least = [_least(shown.iloc[:, number], number) for number in range(shown.shape[1])]
    return sum(map(max, wide, least)) + 2 * shown.shape[1]


def _least(column: pd.Series, number: int) -> int:
    """Characters that a column needs: all of a number, and of a text a name's."""
    longest = max(map(len, column), default=0)
    return longest if number and cells.numeric(column) else min(longest, NAME)


def _headings(shown: pd.DataFrame, width: int) -> list[str]:
    """In lines so short that the table fits, as far as words allow."""
    longest = [max(map(len, column), default=0) for _, column in shown.items()]
    for most in WIDTHS:
        headings = [
            _wrapped(heading, max(cell_width, most))
            for heading, cell_width in zip(shown.columns, longest, strict=True)
        ]
        lines = [max(map(len, heading.split("\n"))) for heading in headings]
        if sum(map(max, lines, longest)) + 2 * len(headings) <= width:
            break
    return headings


def _wrapped(heading: Any, width: int) -> str:
    parts = heading if isinstance(heading, tuple) else (heading,)
    lines = [wrap(part, width, break_long_words=False) for part in parts if part]
    return "\n".join(line for part in lines for line in part)
