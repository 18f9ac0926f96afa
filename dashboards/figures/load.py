"""Servers under load: throughput or goodput against latency, and what drafts at which load."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.look import ARM_COLOURS, DASHED, DASHES, MUTED, base_figure, legend_beside
from specdec_core.search.load.workload import Slo

TPOT = ("tpot_median", "median time per output token, ms")
OF_CLIENTS = dict([TPOT, ("ttft_median", "median time to first token, ms")])
OF_RATES = dict([TPOT, ("ttft_p95", "95th percentile of the time to first token, ms")])


def load_figure(table: pd.DataFrame, title: str, slo: Slo | None = None) -> go.Figure:
    """Throughput over latency, of rows of :func:`specdec_core.evidence.load.result.summary_frame`,
    all with clients or all at rates: a line for each contestant, a point for each load. At rates
    with an objective it is goodput instead, and the limits are drawn."""
    closed = bool(table["clients"].notna().all())
    good = slo is not None and not closed
    measure = "goodput" if good else "tokens_per_second"
    unit = "requests/s within the limits" if good else "tokens/s"
    latencies = OF_CLIENTS if closed else OF_RATES
    points = "numbers of clients" if closed else "requests a second that came"
    fig = make_subplots(1, 2, horizontal_spacing=0.1)
    base_figure(
        title,
        f"By time per token (left) and to the first token (right). Points are {points}; up and to"
        " the left is better. Each group has its dashes.",
        520,
        fig,
    )
    groups = list(dict.fromkeys(table["group"]))
    for name, group, colour in _contestants(table):
        rows = table[(table["group"] == group) & (table["contestant"] == name)]
        what = "clients" if closed else "come"
        for column, latency in enumerate(latencies, start=1):
            fig.add_scatter(
                x=1e3 * rows[latency], y=rows[measure], text=rows["load"], name=name,
                legendgroup=f"{group} {name}", showlegend=column == 1,
                mode="lines+markers+text", textposition="top center",
                textfont={"color": colour, "size": 11}, marker={"color": colour, "size": 8},
                line={"color": colour, "width": 2, "dash": DASHES[groups.index(group)]},
                row=1, col=column,
                hovertemplate=f"<b>{name}</b><br>%{{text}} {what}: %{{y:.4~g}} {unit},"
                " %{x:.1f} ms<extra></extra>",
            )  # fmt: skip
    for column, (latency, label) in enumerate(latencies.items(), start=1):
        fig.update_xaxes(title_text=label, rangemode="tozero", row=1, col=column)
        limit = slo.limits.get(latency.partition("_")[0]) if good and slo else None
        if limit is not None:
            fig.add_vline(x=1e3 * limit, line=DASHED, row=1, col=column)
    return fig.update_yaxes(title_text=unit, rangemode="tozero")


def drafting_figure(table: pd.DataFrame, arms: pd.DataFrame) -> go.Figure:
    """What drafts at which load, of :func:`specdec_core.evidence.load.result.summary_frame` and
    :func:`specdec_core.evidence.load.result.arms_frame`: candidates of a round on average, a line
    for each contestant that drafts; and, of each whose drafters take turns, the rounds of each of
    them."""
    choosing = list(dict.fromkeys(arms["contestant"])) if len(arms) else []
    titles = ["candidates of a round", *(f"rounds of {name} by who drafts" for name in choosing)]
    panels = len(titles)
    fig = make_subplots(panels, 1, subplot_titles=titles, vertical_spacing=0.3 / panels)
    base_figure(
        "What drafts at which load",
        "By the number of clients, or by the requests a second that come (/s).",
        120 + 300 * panels,
        fig,
    )
    loads, contestants = list(dict.fromkeys(table["load"])), _contestants(table)
    for name, _, colour in contestants:
        rows = table[(table["contestant"] == name) & (table["candidates"] > 0)]
        if not len(rows):
            continue
        fig.add_scatter(
            x=rows["load"], y=rows["candidates"], name=name, mode="lines+markers",
            marker={"color": colour, "size": 8}, line={"color": colour, "width": 2},
            hovertemplate=f"<b>{name}</b><br>%{{x}}: %{{y:.2f}} candidates<extra></extra>",
            row=1, col=1,
        )  # fmt: skip
    drafters = list(dict.fromkeys(arms["arm"])) if len(arms) else []
    free = len(contestants) - 1  # the first colour that no contestant has
    shown: set[str] = set()
    for panel, name in enumerate(choosing, start=2):
        mine = arms[arms["contestant"] == name]
        for arm in dict.fromkeys(mine["arm"]):
            rows = mine[mine["arm"] == arm]
            fig.add_bar(
                x=rows["load"], y=rows["share"], name=arm, legendgroup=f"arm {arm}",
                showlegend=arm not in shown,
                marker={"color": ARM_COLOURS[(free + drafters.index(arm)) % len(ARM_COLOURS)]},
                hovertemplate=f"<b>{arm}</b><br>%{{x}}: %{{y:.0%}} of the rounds<extra></extra>",
                row=panel, col=1,
            )  # fmt: skip
            shown.add(arm)
        fig.update_yaxes(range=[0, 1], tickformat=".0%", row=panel, col=1)
    fig.update_layout(barmode="stack")
    fig.update_xaxes(type="category", categoryorder="array", categoryarray=loads)
    fig.update_yaxes(rangemode="tozero", row=1, col=1)
    return legend_beside(fig)


def _contestants(table: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Name, group and colour of each; the first one, which drafts nothing, is grey."""
    names = list(dict.fromkeys(zip(table["contestant"], table["group"], strict=True)))
    colours = [MUTED, *ARM_COLOURS]
    return [
        (name, group, colours[place and 1 + (place - 1) % len(ARM_COLOURS)])
        for place, (name, group) in enumerate(names)
    ]
