"""How close length policies come to the length that would have been accepted."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.look import MUTED, base_figure, family_order, style

FARTHEST = 12  # tokens from the oracle; what is farther off is counted there
ROW = 104  # height of a configuration's row


def length_errors(rounds: pd.DataFrame) -> go.Figure:
    """Drafted tokens minus the oracle's, over rounds (SVIP, Fig. 7b): one row a configuration.

    `rounds` has a row for each round: `label`, `family`, `drafted`, and `oracle`, the candidates
    that would have been accepted at most.
    """
    error = rounds["drafted"] - rounds["oracle"]
    distance = error.abs().groupby(rounds["label"]).mean()
    families = dict(zip(rounds["label"], rounds["family"], strict=True))
    order = sorted(families, key=lambda label: family_order(families[label]))
    count = max(len(order), 1)
    title = "Draft length against the oracle's"
    if len(distance):
        title = (
            f"{distance.idxmin()} comes closest to the oracle's draft length: off by "
            f"{distance.min():.1f} tokens on average"
        )
    fig = base_figure(
        title,
        "Share of rounds by drafted tokens minus the tokens that would have been accepted at most. "
        "Right of 0 is drafted in vain, left of 0 a longer draft was missed, which costs a further "
        "target forward. A rule that stops after a doubtful token reaches +1 at best where that "
        "token is rejected.",
        90 + ROW * count,
        make_subplots(
            rows=count, cols=1, shared_xaxes=True, vertical_spacing=min(30 / (ROW * count), 0.3)
        ),
    )
    for row, label in enumerate(order, start=1):
        own = error[rounds["label"] == label]
        share = own.clip(-FARTHEST, FARTHEST).value_counts(normalize=True).sort_index()
        fig.add_bar(
            x=share.index, y=share, row=row, col=1, name=label, showlegend=False,
            marker={"color": style(families[label]).colour, "line": {"width": 0}},
            hovertemplate=f"<b>{label}</b><br>%{{x:+d}} tokens in %{{y:.1%}} of its rounds"
            "<extra></extra>",
        )  # fmt: skip
        axis = fig.get_subplot(row, 1)
        fig.add_annotation(
            x=0, xref="paper", xanchor="left", y=1, yanchor="bottom", showarrow=False,
            yref=f"{axis.yaxis.plotly_name.replace('axis', '')} domain", align="left",
            text=f"<b>{label}</b>   mean {round(own.mean(), 1) + 0.0:+.1f}, "
            f"off by {distance[label]:.1f}, exact in {np.mean(own == 0):.0%}",
            font={"size": 12},
        )  # fmt: skip
        fig.update_yaxes(
            tickformat=".0%", nticks=3, rangemode="tozero", title_text="share", row=row, col=1
        )
    ticks = [*range(-FARTHEST, FARTHEST + 1, 4)]
    fig.update_xaxes(range=[-FARTHEST - 0.6, FARTHEST + 0.6], zeroline=True, zerolinecolor=MUTED)
    fig.update_xaxes(
        title_text="drafted − oracle (tokens)", row=count, col=1, tickvals=ticks,
        ticktext=[f"≤ {ticks[0]}", *map(str, ticks[1:-1]), f"≥ {ticks[-1]}"],
    )  # fmt: skip
    return fig.update_layout(bargap=0.12)
