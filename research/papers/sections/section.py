"""A section of the page on the papers that is made from recordings or decoded texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pandas as pd

from dashboards.sections import Section
from research.papers.studies import Study
from research.papers.table_verdicts import VERDICT
from specdec_core.config import Value, load_yaml, parse

SECTIONS_FILE = Path(__file__).parents[2] / "sweeps" / "papers-sections.yaml"


class SectionWords(Value):
    """What the page says of a section: the `paper`'s title in `papers-methods.yaml`, its figure or
    table (`source`), a `title`, what the paper found, and what differs here (`setting`)."""

    paper: str
    source: str
    title: str
    reported: str
    setting: str


@dataclass(frozen=True)
class Exhibit(Study):
    """A study and how its table is shown. `show` makes the figure, SVG and table; title, note,
    lines and `verdict` are added to it."""

    show: Callable[[pd.DataFrame], Section]
    verdict: Callable[[pd.DataFrame], str]

    @property
    def words(self) -> SectionWords:
        return section_words()[self.key]

    def section(self, table: pd.DataFrame) -> Section:
        """The section of the study's table."""
        shown, words = self.show(table), self.words
        return replace(
            shown,
            key=self.key,
            title=words.title,
            note=" ".join(filter(None, (f"{words.paper}, {words.source}.", shown.note))),
            lines=[f"In the paper: {words.reported}", f"Here: {words.setting}", *shown.lines],
            terms={VERDICT: self.verdict(table)},
            frame=table,
        )


@cache
def section_words() -> dict[str, SectionWords]:
    """The words of all sections by key."""
    return parse(dict[str, SectionWords], load_yaml(SECTIONS_FILE), str(SECTIONS_FILE))
