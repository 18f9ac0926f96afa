"""Throughput by how many requests are decoded together, and rounds by how long the text is."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.look import (
    ARM_COLOURS,
    DASHED,
    DRAFT_COLOURS,
    INK,
    MUTED,
    TARGET_COLOUR,
    base_figure,
    intervals,
)
from specdec_core.studies.long_context import Line


def throughput_figure(table: pd.DataFrame, title: str) -> go.Figure:
    """Tokens a second and speedup over slots, of :meth:`Throughput.table`."""
    fig = make_subplots(1, 2, horizontal_spacing=0.1)
    base_figure(
        title,
        "All slots busy. Left: tokens a second of all requests together. Right: against decoding "
        "autoregressively at as many slots, with 95 % intervals.",
        440,
        fig,
    )
    configurations = list(dict.fromkeys(table["configuration"]))
    colours = [MUTED, *(ARM_COLOURS * len(configurations))]
    for label, colour in zip(configurations, colours, strict=False):
        rows = table[table["configuration"] == label]
        line = {"color": colour, "width": 2}
        fig.add_scatter(
            x=rows["slots"], y=rows["tokens_per_second"], name=label, legendgroup=label, line=line,
            mode="lines+markers", row=1, col=1,
            hovertemplate=f"<b>{label}</b><br>%{{x}} slots: %{{y:.0f}} tokens/s<extra></extra>",
        )  # fmt: skip
        if (rows["speedup"] == 1).all():
            continue
        fig.add_scatter(
            x=rows["slots"], y=rows["speedup"], name=label, legendgroup=label, showlegend=False,
            line=line, mode="lines+markers", row=1, col=2,
            error_y=intervals(rows["speedup"], rows["low"], rows["high"]),
            hovertemplate=f"<b>{label}</b><br>%{{x}} slots: %{{y:.2f}}×<extra></extra>",
        )  # fmt: skip
    fig.add_hline(y=1, line=DASHED, row=1, col=2)
    slots = sorted(set(table["slots"]))
    fig.update_xaxes(title_text="slots", type="log", tickvals=slots)
    fig.update_yaxes(title_text="tokens/s", rangemode="tozero", col=1)
    fig.update_yaxes(title_text="speedup", rangemode="tozero", col=2)
    return fig


def context_figure(table: pd.DataFrame, lines: Mapping[str, Line], title: str) -> go.Figure:
    """Milliseconds by context: measured, and the line of each."""
    fig = base_figure(
        title,
        "Medians of one row. Dots are measured, lines fitted. What a round takes beyond its "
        "forwards is below.",
        460,
    )
    looks = {
        "round": ("a round of 7 candidates", INK),
        "target_8": ("target, 8 tokens", TARGET_COLOUR),
        "target_1": ("target, 1 token", ARM_COLOURS[3]),
        "draft": ("draft, 1 token", DRAFT_COLOURS[0]),
        "rest": ("rest of the round", DRAFT_COLOURS[1]),
        "autoregressive_rest": ("rest of an autoregressive round", ARM_COLOURS[4]),
    }
    contexts = table["context"]
    for part, (name, colour) in looks.items():
        fitted = lines[part]
        fig.add_scatter(
            x=contexts, y=[1e3 * (fitted.fixed + fitted.per_token * c) for c in contexts],
            mode="lines", line={"color": colour, "width": 1.5}, showlegend=False, hoverinfo="skip",
        )  # fmt: skip
        fig.add_scatter(
            x=contexts, y=1e3 * table[part], mode="markers", name=name,
            marker={"color": colour, "size": 8},
            hovertemplate=f"<b>{name}</b><br>context %{{x}}: %{{y:.2f}} ms<extra></extra>",
        )  # fmt: skip
    fig.update_xaxes(title_text="tokens in the cache", rangemode="tozero")
    fig.update_yaxes(title_text="milliseconds", rangemode="tozero")
    return fig
