"""The training of acceptance heads: how well calibrated they are, and how their loss fell."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.look import DASHED, INK, OTHER_COLOURS, base_figure, legend_beside, style
from specdec_core.drafting.heads.card import HeadCard

MOST_SHOWN = 6  # heads; the others are hidden until clicked in the legend


def reliability_diagram(cards: Mapping[str, HeadCard]) -> go.Figure:
    """Accepted against predicted, on the test prompts, for each head; the marks' areas are the
    bins' shares of the candidates."""
    title = "Accepted against predicted"
    if len(cards) == 1:
        (name,) = cards
        title = f"{name}: accepted against predicted, ECE {cards[name].metrics['ece']:.3f}"
    fig = base_figure(
        title,
        "Candidates of held-out prompts in bins of predicted acceptance, larger where more lie.<br>"
        "On the diagonal a head is calibrated; a weight of rejections pushes it to the left.",
        480,
    )
    fig.add_scatter(
        x=[0, 1], y=[0, 1], mode="lines", name="calibrated", hoverinfo="skip",
        line=DASHED,
    )  # fmt: skip
    for i, ((name, card), colour) in enumerate(zip(cards.items(), _colours(cards), strict=True)):
        bins = card.reliability
        total = max(sum(b.count for b in bins), 1)
        fig.add_scatter(
            x=[b.predicted for b in bins],
            y=[b.accepted for b in bins],
            customdata=[[b.count, b.count / total] for b in bins],
            mode="lines+markers",
            name=name,
            visible=True if i < MOST_SHOWN else "legendonly",
            line={"color": colour, "width": 2},
            marker={
                "size": [5 + 30 * (b.count / total) ** 0.5 for b in bins],
                "opacity": 0.75,
                "color": colour,
            },
            hovertemplate=f"<b>{name}</b><br>predicted %{{x:.3f}}, accepted %{{y:.3f}}<br>"
            "%{customdata[0]} candidates (%{customdata[1]:.1%})<extra></extra>",
        )
    fig.update_xaxes(title_text="predicted acceptance probability (mean of the bin)", range=[0, 1])
    fig.update_yaxes(title_text="share accepted", range=[0, 1.02])
    return legend_beside(fig).update_layout(margin_t=100)


def training_curves(cards: Mapping[str, HeadCard]) -> go.Figure:
    """Loss and KL of each head over epochs: solid on held-out prompts, dotted in training."""
    fig = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    fig = base_figure(
        "Loss and KL over the epochs",
        "Left: the weighted loss that is trained. Right: KL(P‖P̂) without weights, in nats.<br>"
        "Solid: held-out prompts. Dotted: training. The star is the epoch that was kept.",
        440,
        fig,
    )
    for i, ((name, card), colour) in enumerate(zip(cards.items(), _colours(cards), strict=True)):
        epochs = [e.epoch for e in card.curve]
        kept = int(card.metrics["epoch"])
        for column, quantity in enumerate(("loss", "kl"), start=1):
            for split, dash in (("eval", "solid"), ("train", "dot")):
                values = [getattr(e, f"{split}_{quantity}") for e in card.curve]
                marks = ["star" if e == kept and split == "eval" else "circle" for e in epochs]
                fig.add_scatter(
                    x=epochs, y=values, mode="lines+markers", name=name, legendgroup=name,
                    showlegend=column == 1 and split == "eval",
                    visible=True if i < MOST_SHOWN else "legendonly",
                    line={"color": colour, "width": 2, "dash": dash},
                    marker={"size": [12 if m == "star" else 4 for m in marks], "symbol": marks},
                    hovertemplate=f"<b>{name}</b><br>epoch %{{x}}, {split} {quantity} %{{y:.4f}}"
                    "<extra></extra>",
                    row=1, col=column,
                )  # fmt: skip
    fig.update_xaxes(title_text="epoch")
    fig.update_yaxes(title_text="weighted loss", row=1, col=1)
    fig.update_yaxes(title_text="KL (nats)", row=1, col=2)
    return legend_beside(fig).update_layout(margin_t=100)


def _colours(cards: Mapping[str, HeadCard]) -> list[str]:
    shades = [style("specdecpp").colour, style("decision").colour, *OTHER_COLOURS, INK]
    return [shades[i % len(shades)] for i in range(len(cards))]
