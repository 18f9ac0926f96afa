"""A section of the page on the papers that is made from recordings or decoded texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pandas as pd

from dashboards.sections import Section
from research.papers.studies import Study
from research.papers.verdicts import VERDICT


@dataclass(frozen=True)
class PaperSection:
    """A figure or table of a paper: how it is computed, and how its table is shown.

    `paper` is the paper's title in `papers-methods.yaml`, `source` its figure or table,
    `reported` what the paper found, `setting` what differs here. `show` makes the figure, SVG and
    table; title, note, lines and `verdict` are added to it.
    """

    study: Study
    paper: str
    source: str
    title: str
    reported: str
    setting: str
    show: Callable[[pd.DataFrame], Section]
    verdict: Callable[[pd.DataFrame], str]

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
            terms={VERDICT: self.verdict(table)},
            frame=table,
        )
