"""Reports and figures as HTML pages that need no network: one file to open or to send around."""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache
from itertools import accumulate, groupby
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from dashboards import cells, look
from dashboards.sections import Report, Section
from dashboards.templating import render


def page(report: Report) -> str:
    """A report; plotly.js is part of it where it has figures."""
    plotly = get_plotlyjs() if report.figures else ""
    return _page(report.title, report.sections, report.about, report.summary, plotly=plotly)


def figure_page(section: Section) -> str:
    """A figure by itself, with its table."""
    alone = section.alone()
    return _page(alone.title, [alone], compressed=_compressed_plotly())


def _page(title: str, sections: Any, about: str = "", summary: str = "", **scripts: str) -> str:
    return render(
        "page.jinja",
        filters={"json": figure_json, "table": _table},
        title=title,
        about=about,
        summary=summary,
        sections=sections,
        neutral=[look.INK, look.MUTED, look.PAPER],
        **{"plotly": "", "compressed": "", **scripts},
    )


def figure_json(figure: go.Figure) -> str:
    """A figure without its title and subtitle, which are text of the page and wrap there."""
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
    edges = [*accumulate((width for _, width in groups), initial=1)][:-1]
    words = [n for n in range(shown.shape[1]) if n and not cells.numeric(shown.iloc[:, n])]
    headings = [heading[1] if grouped else heading for heading in shown.columns]
    return {
        "groups": groups,
        "headings": [
            {"text": text, "classes": _classes(group=n in edges, words=n in words)}
            for n, text in enumerate(headings)
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
