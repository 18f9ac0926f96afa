"""The page on the papers: a verdict under every exhibit; and a page a paper with the whole tables,
and every method with its place in the code and its test."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pandas as pd

from dashboards import cells
from dashboards.outputs.markdown import part
from dashboards.sections import Section
from research.papers.figures import QUANTITIES
from research.papers.methods import Ours, OursOfSection, Paper, PaperMethod, measured_range
from research.papers.result import PapersResult
from research.papers.sections import SECTIONS, Exhibit
from research.papers.table_verdicts import VERDICT, between
from research.papers.tables import notes, sections_of

TITLE = "The papers, exhibit by exhibit"
ABOUT = (
    "Every table and figure of the papers that is made here, with a verdict: whether the paper's"
    " result holds, both numbers, and the measured reason. A paper's own page has the whole tables,"
    " the settings, and each method with its place in the code and the test that guards it."
)
WHERE = "Every table and figure, and where it is"
MOST_CELLS = 48  # of a table that is shown here, beside no figure


def papers_page(
    result: PapersResult,
    papers: Sequence[Paper],
    made_by: str,
    studied: Mapping[str, pd.DataFrame] | None = None,
    sections: Sequence[Exhibit] = SECTIONS,
    stem: str = "papers",
) -> tuple[str, dict[str, str]]:
    """The page in Markdown, `<stem>.md`, and the files beside it by name: the SVG files, and each
    paper's own page with the whole tables. `studied` has the tables of the studies behind
    `sections`; sections without one are left out."""
    studied = studied or {}
    parts, files = [f"# {TITLE}", ABOUT, _origin(result, made_by), *notes(result)], {}
    if studied and (recorded := _recorded(result)):
        parts.append(recorded)
    for paper in papers:
        shown = [
            section
            for key in paper.tables
            if key in result.tables()
            for section in sections_of(result, key)
        ]
        for each in sections:
            if each.words.paper == paper.title and each.key in studied:
                shown.append(each.section(studied[each.key]))
        long_form = f"{stem}-{re.sub(r'[^a-z]+', '-', paper.title.lower()).strip('-')}.md"
        parts.append(f"## {paper.title}")
        parts += [_in_short(section, long_form) for section in shown]
        files[long_form] = _long_form(result, paper, shown)
        files |= {f"{section.key}.svg": section.svg for section in shown if section.svg}
    return "\n\n".join(parts) + "\n", files


def _in_short(section: Section, long_form: str) -> str:
    """An exhibit with its verdict and its figure, or else its table where that is small."""
    small = section.shown is not None and section.shown.size <= MOST_CELLS
    shown = Section(
        key=section.key,
        title=section.title,
        terms={VERDICT: section.terms[VERDICT]} if section.terms else {},
        svg=section.svg,
        shown=section.shown if small and not section.svg else None,
    )
    return (
        f'<a id="{section.key}"></a>\n\n#{part(shown)}\n\n[Whole table]({long_form}#{section.key})'
    )


def _long_form(result: PapersResult, paper: Paper, shown: Sequence[Section]) -> str:
    """A paper's own page: methods, errata, and the sections in full."""
    titles = {section.key: section.title for section in shown}
    parts = [f"# {paper.title}", part(_methods(result, paper, titles))]
    if paper.errata:
        errata = "\n".join(f"- {each}" for each in paper.errata)
        parts += ["Where the text is wrong or unclear:", errata]
    parts.append(_where(paper, titles))
    parts += [f'<a id="{section.key}"></a>\n\n{part(section)}' for section in shown]
    return "\n\n".join(filter(None, parts)) + "\n"


def _where(paper: Paper, titles: Mapping[str, str]) -> str:
    """Where the page shows the paper's tables and figures, or why it does not. `titles` are those
    of its parts, by key. Empty where the paper has none."""

    def here(shown: tuple[str, ...] | str) -> str:
        if isinstance(shown, str):
            return f"not shown: {shown}"
        return ", ".join(
            f"[{titles[key]}](#{key})" if key in titles else f"`{key}` (not made this time)"
            for key in shown
        )

    together: dict[tuple[str, ...] | str, list[str]] = {}
    for name, shown in paper.exhibits.items():
        together.setdefault(shown, []).append(name)
    rows = [{"there": ", ".join(names), "here": here(each)} for each, names in together.items()]
    if not rows:
        return ""
    return part(Section(key="", title=WHERE, shown=cells.texts(rows)))


def _origin(result: PapersResult, made_by: str) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in result.environment.items())
    return f"{made_by} · {result.started:%Y-%m-%d} · {facts}".rstrip(" ·")


def _recorded(result: PapersResult) -> str:
    """How many prompts the replayed exhibits have; empty where as many as are decoded."""
    plan = result.plan
    numbers = [
        f"`{key}` {each.limit} of each of {', '.join(each.prompts)}"
        for key, each in plan.recordings.items()
        if each.limit
    ]
    return f"Recorded prompts, at most: {'; '.join(numbers)}." if numbers else ""


def _methods(result: PapersResult, paper: Paper, titles: Mapping[str, str]) -> Section:
    def ours(each: PaperMethod) -> str:
        if not isinstance(each.ours, OursOfSection):
            return _ours(result, each.ours)
        key = each.ours.section
        return f"[{titles[key]}](#{key})" if key in titles else cells.NONE

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
    return Section(key="methods", shown=cells.texts(rows))


def _ours(result: PapersResult, ours: Ours | None) -> str:
    """A range with the quantity's name."""
    ends = None if ours is None else measured_range(result, ours)
    if ours is None or ends is None:
        return cells.NONE
    look = QUANTITIES[ours.quantity]
    name = "" if ours.quantity == "speedup" else f"{look.heading} "
    return name + between(ends, look.form)
