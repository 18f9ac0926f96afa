"""Speed, accepted tokens and entropy along a long text."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.look import (
    ARM_COLOURS,
    DASHED,
    DRAFT_COLOURS,
    MUTED,
    TARGET_COLOUR,
    base_figure,
    intervals,
)


def along_figure(table: pd.DataFrame, title: str) -> go.Figure:
    """Speedup and MAT by range of context, of :meth:`LongForm.table`."""
    fig = make_subplots(1, 2, horizontal_spacing=0.1)
    base_figure(
        title,
        "By the tokens before a round. Left: against autoregressive decoding in the same range, "
        "with 95 % intervals. Right: tokens a target forward.",
        440,
        fig,
    )
    labels = list(dict.fromkeys(table["configuration"]))
    for label, colour in zip(labels, [MUTED, *(ARM_COLOURS * len(labels))], strict=False):
        rows = table[table["configuration"] == label]
        look = {"line": {"color": colour, "width": 2}, "mode": "lines+markers", "name": label}
        if label != labels[0]:
            fig.add_scatter(
                x=rows["up_to"], y=rows["speedup"], legendgroup=label, row=1, col=1, **look,
                error_y=intervals(rows["speedup"], rows["low"], rows["high"]),
                hovertemplate=f"<b>{label}</b><br>up to %{{x}}: %{{y:.2f}}×<extra></extra>",
            )  # fmt: skip
            fig.add_scatter(
                x=rows["up_to"], y=rows["mat"], legendgroup=label, row=1, col=2, showlegend=False,
                hovertemplate=f"<b>{label}</b><br>up to %{{x}}: %{{y:.2f}}<extra></extra>", **look,
            )  # fmt: skip
    fig.add_hline(y=1, line=DASHED)
    _contexts(fig, table)
    fig.update_yaxes(title_text="speedup", rangemode="tozero", col=1)
    fig.update_yaxes(title_text="tokens a forward", rangemode="tozero", col=2)
    return fig


def entropy_figure(table: pd.DataFrame, title: str) -> go.Figure:
    """Entropy by range of context, of :meth:`LongForm.entropy_table`."""
    fig = base_figure(
        title,
        "Nats, at temperature 1, of what each model expects next in the target's own texts: "
        "medians, with the middle half of the tokens.",
        400,
    )
    models = list(dict.fromkeys(table["model"]))
    for model, colour in zip(models, [TARGET_COLOUR, *DRAFT_COLOURS], strict=False):
        rows = table[table["model"] == model]
        fig.add_scatter(
            x=rows["up_to"], y=rows["median"], name=model, mode="lines+markers",
            line={"color": colour, "width": 2},
            error_y=intervals(rows["median"], rows["low"], rows["high"]),
            hovertemplate=f"<b>{model}</b><br>up to %{{x}}: %{{y:.2f}} nats<extra></extra>",
        )  # fmt: skip
    _contexts(fig, table)
    fig.update_yaxes(title_text="entropy, nats", rangemode="tozero")
    return fig


def _contexts(fig: go.Figure, table: pd.DataFrame) -> None:
    ends = sorted(set(table["up_to"]))
    fig.update_xaxes(title_text="tokens of context, up to", type="log", tickvals=ends)
