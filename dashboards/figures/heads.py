"""Trained acceptance heads: how well they fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from dashboards.look import DASHED, INK, OTHER_COLOURS, base_figure, style
from specdec_core.config.policies import head_name

if TYPE_CHECKING:
    from specdec_core.drafting.heads.card import HeadCard

MOST_SHOWN = 6  # heads; further heads are hidden until clicked in the legend


def reliability_diagram(cards: Mapping[str, HeadCard]) -> go.Figure:
    """Accepted against predicted, on the test prompts, for each head; the marks' areas are the
    bins' shares of the candidates."""
    title = "Accepted against predicted"
    if len(cards) == 1:
        ((name, card),) = cards.items()
        title = f"{head_name(name)}: accepted against predicted"
        title += f", ECE {card.metrics['ece']:.3f}" if "ece" in card.metrics else ""
    fig = base_figure(
        title,
        "Candidates of held-out prompts in bins of predicted acceptance, larger where more lie.<br>"
        "On the diagonal a head is calibrated; a weight of rejections pushes it to the left.",
        480,
    )
    fig.add_scatter(
        x=[0, 1], y=[0, 1], mode="lines", name="calibrated", hoverinfo="skip", line=DASHED
    )
    colours = [style("specdecpp").colour, style("decision").colour, *OTHER_COLOURS, INK]
    for i, (name, card) in enumerate(cards.items()):
        bins, colour, label = card.reliability, colours[i % len(colours)], head_name(name)
        shares = [b.count / max(sum(b.count for b in bins), 1) for b in bins]
        fig.add_scatter(
            x=[b.predicted for b in bins], y=[b.accepted for b in bins], mode="lines+markers",
            customdata=[[b.count, share] for b, share in zip(bins, shares, strict=True)],
            name=label, visible=True if i < MOST_SHOWN else "legendonly",
            line={"color": colour, "width": 2},
            marker={"size": [5 + 30 * s**0.5 for s in shares], "opacity": 0.75, "color": colour},
            hovertemplate=f"<b>{label}</b><br>predicted %{{x:.3f}}, accepted %{{y:.3f}}<br>"
            "%{customdata[0]} candidates (%{customdata[1]:.1%})<extra></extra>",
        )  # fmt: skip
    fig.update_xaxes(title_text="predicted acceptance probability (mean of the bin)", range=[0, 1])
    fig.update_yaxes(title_text="share accepted", range=[0, 1.02])
    beside = {"orientation": "v", "x": 1.02, "y": 1, "yanchor": "top", "tracegroupgap": 0}
    return fig.update_layout(legend=beside, margin_t=100)
