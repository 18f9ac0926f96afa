"""How well length policies hit the length that would have been accepted, and how they learn."""

from __future__ import annotations

from collections.abc import Mapping

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
    labels = rounds[["label", "family"]].drop_duplicates()
    order = sorted(labels.to_numpy().tolist(), key=lambda row: family_order(row[1]))
    count = max(len(order), 1)
    distance = (rounds["drafted"] - rounds["oracle"]).abs().groupby(rounds["label"]).mean()
    title = "Draft length against the oracle's"
    if len(distance):
        title = (
            f"{distance.idxmin()} comes closest to the oracle's draft length: off by "
            f"{distance.min():.1f} tokens on average"
        )
    fig = base_figure(
        title,
        "Share of rounds by drafted tokens minus the tokens that would have been accepted at most. "
        "Right of 0 is drafted in vain, left of 0 a longer draft was missed, which takes a target "
        "forward more. Rules that stop behind a doubtful token reach +1 at best where it is "
        "rejected.",
        90 + ROW * count,
        make_subplots(
            rows=count, cols=1, shared_xaxes=True, vertical_spacing=min(30 / (ROW * count), 0.3)
        ),
    )
    for row, (label, family) in enumerate(order, start=1):
        selected = rounds[rounds["label"] == label]
        error = (selected["drafted"] - selected["oracle"]).to_numpy()
        values, counts = np.unique(np.clip(error, -FARTHEST, FARTHEST), return_counts=True)
        share = counts / counts.sum()
        fig.add_bar(
            x=values, y=share, row=row, col=1, name=label, showlegend=False,
            customdata=[_words(int(v)) for v in values],
            marker={"color": style(family).colour, "line": {"width": 0}},
            hovertemplate=f"<b>{label}</b><br>%{{customdata}} in %{{y:.1%}} of its rounds"
            "<extra></extra>",
        )  # fmt: skip
        axis = fig.get_subplot(row, 1)
        fig.add_annotation(
            x=0, xref="paper", xanchor="left", y=1, yanchor="bottom", showarrow=False,
            yref=f"{axis.yaxis.plotly_name.replace('axis', '')} domain", align="left",
            text=f"<b>{label}</b>   mean {round(error.mean(), 1) + 0.0:+.1f}, "
            f"off by {distance[label]:.1f}, exact in {np.mean(error == 0):.0%}",
            font={"size": 12},
        )  # fmt: skip
        fig.update_yaxes(
            tickformat=".0%", nticks=3, rangemode="tozero", title_text="share", row=row, col=1
        )
    fig.update_xaxes(range=[-FARTHEST - 0.6, FARTHEST + 0.6], zeroline=True, zerolinecolor=MUTED)
    fig.update_xaxes(
        title_text="drafted − oracle (tokens)", row=count, col=1,
        tickvals=[*range(-FARTHEST, FARTHEST + 1, 4)],
        ticktext=[
            f"≤ {v}" if v == -FARTHEST else f"≥ {v}" if v == FARTHEST else f"{v}"
            for v in range(-FARTHEST, FARTHEST + 1, 4)
        ],
    )  # fmt: skip
    fig.update_layout(bargap=0.12)
    return fig


def _words(error: int) -> str:
    if not error:
        return "exactly the oracle's length"
    more = " or more" if abs(error) == FARTHEST else ""
    return f"{abs(error)}{more} tokens too {'long' if error > 0 else 'short'}"


def utilisation_over_time(
    runs: Mapping[str, pd.DataFrame], families: Mapping[str, str] | None = None, window: int = 10
) -> go.Figure:
    """Output tokens per draft call while requests come in (Post-use, Fig. 4 and Eq. 3): all
    requests so far, and faint the last `window` of them.

    `runs`, by name in the order of the legend, has a row for each round in the order decoded:
    `request_id`, `generated`, `draft_forwards`. `families` gives each run's colour.
    """
    families = families or {}
    totals = {name: utilisation(rounds, window) for name, rounds in runs.items()}
    ends = [f"{t['so far'].iloc[-1]:.2f} with {name}" for name, t in totals.items() if len(t)]
    fig = base_figure(
        "Output tokens per draft call: " + "; ".join(ends),
        f"Over all requests so far; faint, over the last {window}. Q_init is the table before "
        "anything was learned, followed for good; what learning adds is the distance to it.",
        440,
    )
    seen: list[str] = []
    for name, table in totals.items():
        look = style(families.get(name, name))
        dash = ("solid", "dash", "dot")[min(seen.count(look.colour), 2)]
        seen.append(look.colour)
        for column, opacity, width in (("recent", 0.28, 1.2), ("so far", 1.0, 2.4)):
            fig.add_scatter(
                x=table.index + 1, y=table[column], mode="lines", name=name, legendgroup=name,
                showlegend=column == "so far", opacity=opacity,
                line={"color": look.colour, "width": width, "dash": dash},
                hovertemplate=f"<b>{name}</b><br>request %{{x}}: %{{y:.3f}} tokens a draft call "
                f"({column})<extra></extra>",
            )  # fmt: skip
    fig.update_xaxes(title_text="requests decoded")
    fig.update_yaxes(title_text="output tokens per draft call")
    return fig


def utilisation(rounds: pd.DataFrame, window: int) -> pd.DataFrame:
    """One row a request, in order: tokens per draft call so far, and over the last `window`."""
    sums = rounds.groupby("request_id", sort=False)[["generated", "draft_forwards"]].sum()
    sums = sums.reset_index(drop=True)
    so_far, recent = sums.cumsum(), sums.rolling(window, min_periods=1).sum()
    return pd.DataFrame({
        "so far": so_far["generated"] / so_far["draft_forwards"].clip(lower=1),
        "recent": recent["generated"] / recent["draft_forwards"].clip(lower=1),
    })  # fmt: skip
