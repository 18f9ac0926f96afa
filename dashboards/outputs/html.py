"""Reports as HTML pages that need no network: one file to open or to send around."""

from __future__ import annotations

import base64
import gzip
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from dashboards import cells, look
from dashboards.sections import Report


def page(report: Report) -> str:
    """A report; plotly.js is part of it where it has figures. Text in the template's values is
    escaped; a value that is missing raises."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1] / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"json": figure_json, "groups": _groups, "columns": _columns}
    environment.filters["split"] = cells.split
    sections = report.sections
    return environment.get_template("page.jinja").render(
        title=report.title,
        about=report.about,
        sections=sections,
        neutral=[look.INK, look.MUTED, look.PAPER],
        plotly=_compressed_plotly() if any(s.figure is not None for s in sections) else "",
    )


def figure_json(figure: go.Figure) -> str:
    """A figure without its title and subtitle, which wrap as text of the page. Plotly escapes what
    could end the script element."""
    return str(go.Figure(figure).update_layout(title=None, margin_t=24).to_json())


def _groups(shown: pd.DataFrame) -> list[tuple[str, int]]:
    """The groups of a table's columns after its first one, and how many columns each has."""
    if shown.columns.nlevels == 1:
        return []
    groups = groupby(shown.columns[1:], key=lambda heading: heading[0])
    return [(name, len(list(members))) for name, members in groups]


def _columns(shown: pd.DataFrame) -> list[tuple[str, str]]:
    """The heading of each column, and its classes: whether a group begins with it, and whether it
    holds words."""
    widths = [width for _, width in _groups(shown)]
    firsts = set(accumulate(widths, initial=1)) if widths else ()
    columns = []
    for number, (heading, column) in enumerate(shown.items()):
        classes = ["group"] if number in firsts else []
        if number and not cells.numeric(column):
            classes.append("words")
        text = str(heading[1] if isinstance(heading, tuple) else heading)
        columns.append((text, " ".join(classes)))
    return columns


@cache
def _compressed_plotly() -> str:
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
