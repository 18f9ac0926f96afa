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
Measure = Callable[..., pd.DataFrame]


class SectionWords(Value):
    """What the page says of a section: the `paper`'s title in `papers-methods.yaml`, its figure or
    table (`source`), a `title`, what the paper found, and what differs here (`setting`)."""

    paper: str
    source: str
    title: str
    reported: str
    setting: str


@dataclass(frozen=True)
class PaperSection:
    """A figure or table of a paper: how it is computed, and how its table is shown. `show` makes
    the figure, SVG and table; title, note, lines and `verdict` are added to it."""

    study: Study
    show: Callable[[pd.DataFrame], Section]
    verdict: Callable[[pd.DataFrame], str]
    words: SectionWords

    @property
    def key(self) -> str:
        return self.study.key

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


def exhibit(
    key: str,
    needs: tuple[str, ...],
    measure: Measure,
    show: Callable[[pd.DataFrame], Section],
    verdict: Callable[[pd.DataFrame], str],
    version: int = 1,
) -> PaperSection:
    """The section of a :class:`Study` with the words that `papers-sections.yaml` has for it."""
    return PaperSection(Study(key, needs, measure, version), show, verdict, _words()[key])


@cache
def _words() -> dict[str, SectionWords]:
    return parse(dict[str, SectionWords], load_yaml(SECTIONS_FILE), str(SECTIONS_FILE))
