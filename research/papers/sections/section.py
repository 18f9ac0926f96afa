"""A section of the page on the papers that is made from recordings or decoded texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pandas as pd

from dashboards import cells
from dashboards.sections import Section
from research.papers.studies import Study


@dataclass(frozen=True)
class PaperSection:
    """A figure or table of a paper: how it is computed, and how its table is shown.

    `paper` is the paper's title in `papers-methods.yaml`, `source` its figure or table,
    `reported` what the paper found, `setting` what differs here. `show` makes the figure, SVG and
    table; title, note and lines are added to it. `ours` is the number for the table of methods.
    """

    study: Study
    paper: str
    source: str
    title: str
    reported: str
    setting: str
    show: Callable[[pd.DataFrame], Section]
    ours: Callable[[pd.DataFrame], str] = lambda table: cells.NONE

    @property
    def key(self) -> str:
        return self.study.key

    def section(self, table: pd.DataFrame) -> Section:
        """The section of the study's table."""
        shown = self.show(table)
        return replace(
            shown,
            key=self.key,
            title=self.title,
            note=" ".join(filter(None, (f"{self.paper}, {self.source}.", shown.note))),
            lines=[f"In the paper: {self.reported}", f"Here: {self.setting}", *shown.lines],
            frame=table,
        )


def shown_range(values: pd.Series, form: str) -> str:
    """The least and the greatest of some values."""
    low, high = (cells.as_number(value, form) for value in (values.min(), values.max()))
    return low if low == high else f"{low}–{high}"
