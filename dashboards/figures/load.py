"""Throughput against latency of servers under load."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.look import ARM_COLOURS, DASHES, MUTED, base_figure

LATENCIES = {
    "tpot_median": "median time per output token, ms",
    "ttft_median": "median time to first token, ms",
}


def load_figure(table: pd.DataFrame, title: str) -> go.Figure:
    """Tokens a second over latency, of :func:`specdec_core.studies.load.result.summary_frame`: a
    line for each contestant, a point for each number of clients."""
    fig = make_subplots(1, 2, horizontal_spacing=0.1)
    base_figure(
        title,
        "By time per token (left) and to the first token (right). Points are numbers of clients; up"
        " and to the left is better. Each group has its dashes.",
        520,
        fig,
    )
    groups = list(dict.fromkeys(table["group"]))
    names = list(dict.fromkeys(zip(table["group"], table["contestant"], strict=True)))
    for place, (group, name) in enumerate(names):
        rows = table[(table["group"] == group) & (table["contestant"] == name)]
        colour = ARM_COLOURS[place % len(ARM_COLOURS)] if place else MUTED
        for column, latency in enumerate(LATENCIES, start=1):
            fig.add_scatter(
                x=1e3 * rows[latency], y=rows["tokens_per_second"], text=rows["clients"], name=name,
                legendgroup=f"{group} {name}", showlegend=column == 1,
                mode="lines+markers+text", textposition="top center",
                textfont={"color": colour, "size": 11}, marker={"color": colour, "size": 8},
                line={"color": colour, "width": 2, "dash": DASHES[groups.index(group)]},
                row=1, col=column,
                hovertemplate=f"<b>{name}</b><br>%{{text}} clients: %{{y:.0f}} tokens/s,"
                " %{x:.1f} ms<extra></extra>",
            )  # fmt: skip
    for column, label in enumerate(LATENCIES.values(), start=1):
        fig.update_xaxes(title_text=label, rangemode="tozero", row=1, col=column)
    return fig.update_yaxes(title_text="tokens/s", rangemode="tozero")
