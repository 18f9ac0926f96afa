"""Sections as Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from dashboards import cells
from dashboards.sections import Report, Section


def document(report: Report) -> str:
    """A report; the SVG files of its sections are expected in the same folder."""
    parts = [f"# {report.title}", report.about, *map(part, report.sections)]
    return "\n\n".join(filter(None, parts)) + "\n"


def part(section: Section) -> str:
    """A section; empty for one that has only a figure."""
    parts = [section.note, *_list(section)]
    if section.shown is not None:
        parts.append(_table(section))
    parts.append(section.legend)
    if section.svg:
        parts.insert(0, f"![{section.title}]({section.key}.svg)")
    elif section.shown is None and section.figure is not None:
        return ""
    heading = f"## {section.title}" if section.title else ""
    return "\n\n".join(filter(None, (heading, *parts)))


def _list(section: Section) -> list[str]:
    lines = [
        *section.lines,
        *(f"**{name}**: {value}" for name, value in section.terms.items()),
    ]
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def _table(section: Section) -> str:
    shown = section.shown
    assert shown is not None
    headings = [" ".join(h).strip() if isinstance(h, tuple) else h for h in shown.columns]
    right = [bool(n) and cells.numeric(shown.iloc[:, n]) for n in range(len(headings))]
    lines = [_row(headings), _row("--:" if aligned else "---" for aligned in right)]
    for number, row in enumerate(shown.itertuples(index=False)):
        lines.append(
            _row(
                _bold(cell) if number in section.marked or (number, n) in section.best else cell
                for n, cell in enumerate(row)
            )
        )
    return "\n".join(lines)


def _bold(cell: str) -> str:
    """The value, without its interval."""
    value, interval = cells.split(cell)
    bold = f"**{value}**" if value else ""
    return f"{bold} ({interval})" if interval else bold


def _row(texts: Iterable[str]) -> str:
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"
