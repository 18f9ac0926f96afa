"""Reports as HTML pages that need no network: one file to open or to send around."""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from dashboards import cells, look
from dashboards.sections import Report, Section


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
    environment.filters |= {"json": figure_json, "table": _table}
    sections = report.sections
    return environment.get_template("page.jinja").render(
        title=report.title,
        about=report.about,
        sections=sections,
        neutral=[look.INK, look.MUTED, look.PAPER],
        plotly=_compressed_plotly() if any(s.figure is not None for s in sections) else "",
    )


def figure_json(figure: go.Figure) -> str:
    """A figure without its title and subtitle, which wrap as text of the page."""
    bare = go.Figure(figure).update_layout(title=None, margin_t=24)
    text = json.dumps(json.loads(bare.to_json()), separators=(",", ":"))
    return text.replace("<", "\\u003c")  # it could end the script element


def _table(section: Section) -> dict[str, Any] | None:
    """A section's table as the template writes it."""
    shown = section.shown
    if shown is None:
        return None
    grouped = shown.columns.nlevels > 1
    groups = [
        (name, len(list(members)))
        for name, members in groupby(shown.columns[1:], key=lambda heading: heading[0])
        if grouped
    ]
    edges = [1 + sum(width for _, width in groups[:n]) for n in range(len(groups))]
    words = [n for n in range(shown.shape[1]) if n and not cells.numeric(shown.iloc[:, n])]
    return {
        "groups": groups,
        "headings": [
            {
                "text": heading[1] if grouped else heading,
                "classes": _classes(group=n in edges, words=n in words),
            }
            for n, heading in enumerate(shown.columns)
        ],
        "rows": [
            {
                "classes": _classes(marked=number in section.marked, ruled=number in section.ruled),
                "tooltip": section.tooltips[number] if section.tooltips else "",
                "swatch": section.swatches[number] if section.swatches else "",
                "cells": [
                    {
                        "value": cells.split(cell)[0],
                        "interval": cells.split(cell)[1],
                        "best": (number, n) in section.best,
                        "classes": _classes(
                            group=n in edges, words=n in words, estimate=cells.is_estimate(cell)
                        ),
                    }
                    for n, cell in enumerate(row)
                ],
            }
            for number, row in enumerate(shown.itertuples(index=False))
        ],
    }


def _classes(**flags: bool) -> str:
    return " ".join(name for name, is_set in flags.items() if is_set)


@cache
def _compressed_plotly() -> str:
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
