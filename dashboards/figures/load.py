"""Servers under load: throughput or goodput against latency."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.look import ARM_COLOURS, DASHED, DASHES, MUTED, base_figure
from specdec_core.search.load.workload import Slo

TPOT = ("tpot_median", "median time per output token, ms")
OF_CLIENTS = dict([TPOT, ("ttft_median", "median time to first token, ms")])
OF_RATES = dict([TPOT, ("ttft_p95", "95th percentile of the time to first token, ms")])


def load_figure(table: pd.DataFrame, title: str, slo: Slo | None = None) -> go.Figure:
    """Throughput over latency, of rows of :func:`specdec_core.evidence.load.result.summary_frame`,
    all with clients or all at rates: a line for each contestant, a point for each load. At rates
    with an objective it is goodput instead, and the limits are drawn."""
    closed = bool(table["clients"].notna().all())
    limits = slo.limits if slo is not None and not closed else {}
    measure, unit = (
        ("goodput", "requests/s within the limits") if limits else ("tokens_per_second", "tokens/s")
    )
    points = "clients" if closed else "requests/s"
    fig = base_figure(
        title,
        f"By time per token (left) and to the first token (right). Points are {points}; up and to"
        " the left is better. Lines of one group have the same dashes.",
        520,
        make_subplots(1, 2, horizontal_spacing=0.1),
    )
    groups = list(dict.fromkeys(table["group"]))
    for column, (latency, label) in enumerate((OF_CLIENTS if closed else OF_RATES).items(), 1):
        for name, group, colour, rows in _contestants(table):
            fig.add_scatter(
                x=1e3 * rows[latency], y=rows[measure], text=rows["load"], name=name,
                legendgroup=f"{group} {name}", showlegend=column == 1,
                mode="lines+markers+text", textposition="top center",
                textfont={"color": colour, "size": 11}, marker={"color": colour, "size": 8},
                line={"color": colour, "width": 2, "dash": DASHES[groups.index(group)]},
                row=1, col=column,
                hovertemplate=f"<b>{name}</b><br>%{{text}} {points}: %{{y:.4~g}} {unit},"
                " %{x:.1f} ms<extra></extra>",
            )  # fmt: skip
        fig.update_xaxes(title_text=label, rangemode="tozero", row=1, col=column)
        limit = limits.get(latency.partition("_")[0])
        if limit is not None:
            fig.add_vline(x=1e3 * limit, line=DASHED, row=1, col=column)
    return fig.update_yaxes(title_text=unit, rangemode="tozero")


def _contestants(table: pd.DataFrame) -> Iterator[tuple[str, str, str, pd.DataFrame]]:
    """Name, group, colour and rows of each; the first one, which drafts nothing, is grey."""
    colours = [MUTED, *ARM_COLOURS * len(table)]
    parts = table.groupby(["contestant", "group"], sort=False)
    for ((name, group), rows), colour in zip(parts, colours, strict=False):
        yield str(name), str(group), colour, rows
