"""A section of a report: a table and perhaps a figure, for the console, Markdown, CSV and HTML."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go
from rich import box
from rich.table import Table


@dataclass(frozen=True)
class Section:
    """A part of a report. `frame` has the numbers, which are written as `<key>.csv`; `shown` has
    the same as text, a column a heading. `marked` are rows to stress."""

    key: str
    title: str
    note: str
    frame: pd.DataFrame
    shown: pd.DataFrame
    figure: go.Figure | None = None
    svg: str | None = None
    marked: tuple[int, ...] = ()
    brief: tuple[str, ...] = ()  # the columns that a console shows; unset, all
    on_console: bool = True

    def rich(self) -> Table:
        """For the console."""
        shown = self.shown[[*self.brief]] if self.brief else self.shown
        table = Table(
            title=self.title,
            title_justify="left",
            box=box.SIMPLE,
            pad_edge=False,
            collapse_padding=True,
        )
        for number, heading in enumerate(shown.columns):
            table.add_column(heading, justify="right" if number else "left")
        for number, cells in enumerate(shown.itertuples(index=False)):
            table.add_row(*cells, style="bold" if number in self.marked else None)
        return table

    def markdown(self) -> str:
        """For `report.md`, beside which its SVG lies."""
        lines = [list(self.shown.columns), ["---", *["--:"] * (self.shown.shape[1] - 1)]]
        for number, cells in enumerate(self.shown.itertuples(index=False)):
            own = [cell.replace("|", "\\|") for cell in cells]
            lines.append([f"**{cell}**" for cell in own] if number in self.marked else own)
        parts = [f"## {self.title}"]
        parts += [f"![{self.title}]({self.key}.svg)"] if self.svg else []
        parts += [self.note] if self.note else []
        return "\n\n".join([*parts, "\n".join(f"| {' | '.join(line)} |" for line in lines)])
