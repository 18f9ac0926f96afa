"""The page on the papers: every method with its place in the code, its test and both numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from dashboards import cells
from dashboards.outputs.markdown import part
from dashboards.sections import Section
from research.papers.figures import QUANTITIES
from research.papers.methods import (
    Ours,
    OursOfSection,
    Paper,
    PaperMethod,
    measured_range,
)
from research.papers.result import PapersResult
from research.papers.sections import SECTIONS, PaperSection
from research.papers.sections.section import shown_range
from research.papers.tables import notes, sections_of

TITLE = "The papers, method by method"
ABOUT = (
    "Each table names a method or result of a paper, where the code has it, the test that guards"
    " it, the paper's number, and the one measured here: of a row in a table below the range over"
    " prompt sets, drafts and temperatures. A dash was not measured."
)
WHERE = "Every table and figure, and where it is"


def papers_page(
    result: PapersResult,
    papers: Sequence[Paper],
    made_by: str,
    studied: Mapping[str, pd.DataFrame] | None = None,
    sections: Sequence[PaperSection] = SECTIONS,
) -> tuple[str, dict[str, str]]:
    """The page in Markdown, and the SVG files that it shows, by name. `studied` has the tables of
    the studies behind `sections`; sections without one are left out."""
    studied = studied or {}
    head = [f"# {TITLE}", ABOUT, _origin(result, made_by), *notes(result)]
    parts: list[str] = []
    figures: dict[str, str] = {}
    titles: dict[str, str] = {}  # of what is on the page

    def add(section: Section) -> None:
        titles[section.key] = section.title
        if section.svg:
            figures[f"{section.key}.svg"] = section.svg
        parts.append(f'<a id="{section.key}"></a>\n\n#{part(section)}')

    for paper in papers:
        parts += [f"## {paper.title}", part(_methods(result, paper, studied, sections))]
        if paper.errata:
            parts += ["Where the text is wrong or unclear:", _list(paper.errata)]
        for key in paper.tables:
            if key in result.tables():
                for shown in sections_of(result, key):
                    add(shown)
        for study in sections:
            if study.paper == paper.title and study.key in studied:
                add(study.section(studied[study.key]))
    return "\n\n".join(filter(None, [*head, _where(papers, titles), *parts])) + "\n", figures


def _where(papers: Sequence[Paper], titles: Mapping[str, str]) -> str:
    """Where the page shows the papers' tables and figures, or why it does not. `titles` are those
    of its parts, by key. Empty where no paper has any."""

    def here(shown: tuple[str, ...] | str) -> str:
        if isinstance(shown, str):
            return f"not shown: {shown}"
        return ", ".join(
            f"[{titles[key]}](#{key})" if key in titles else f"`{key}` (not made this time)"
            for key in shown
        )

    rows = []
    for paper in papers:
        together: dict[tuple[str, ...] | str, list[str]] = {}
        for name, shown in paper.exhibits.items():
            together.setdefault(shown, []).append(name)
        rows += [
            {"paper": paper.title, "there": ", ".join(names), "here": here(shown)}
            for shown, names in together.items()
        ]
    if not rows:
        return ""
    return part(Section(key="", title=WHERE, shown=pd.DataFrame(rows, dtype=object)))


def _origin(result: PapersResult, made_by: str) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in result.environment.items())
    return f"`{made_by}` · {result.started:%Y-%m-%d} · {facts}".rstrip(" ·")


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _methods(
    result: PapersResult,
    paper: Paper,
    studied: Mapping[str, pd.DataFrame],
    sections: Sequence[PaperSection],
) -> Section:
    of_sections = {each.key: each.ours for each in sections}

    def ours(each: PaperMethod) -> str:
        if isinstance(each.ours, OursOfSection):
            key = each.ours.section
            if key in studied:
                return of_sections[key](studied[key])
            return _fit(result, key.removesuffix("-forwards"))
        return _ours(result, each.ours)

    rows = [
        {
            "method": each.method,
            "equation or algorithm": each.source,
            "code": f"`{each.code}`",
            "test": f"`{each.test}`",
            "paper": each.reported or cells.NONE,
            "here": ours(each),
        }
        for each in paper.methods
    ]
    return Section(key="methods", shown=pd.DataFrame(rows, dtype=object))


def _ours(result: PapersResult, ours: Ours | None) -> str:
    """A range with the quantity's name."""
    ends = None if ours is None else measured_range(result, ours)
    if ours is None or ends is None:
        return cells.NONE
    look = QUANTITIES[ours.quantity]
    low, high = (cells.as_number(value, look.form) for value in ends)
    name = "" if ours.quantity == "speedup" else f"{look.heading} "
    return name + (low if low == high else f"{low}–{high}")


def _fit(result: PapersResult, key: str) -> str:
    """How well a table's decodings fit forward times."""
    times = result.forward_times(key) if key in result.tables() else pd.DataFrame()
    return cells.NONE if times.empty else f"R² {shown_range(times['r2'], '.4f')}"
