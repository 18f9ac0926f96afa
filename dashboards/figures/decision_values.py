"""The values of decision models by outcome (improved MCSD, Fig. 7)."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.figures.svg import SvgBar, bars_svg
from dashboards.look import DASHED, PARTS, base_figure
from specdec_core.studies.decision_values import THRESHOLD, DecisionValues

OUTCOMES = {
    "accepted": PARTS["draft forwards, kept"],
    "rejected": PARTS["draft forwards, thrown away"],
}
ABOUT = "share of the accepted and of the rejected candidates by the decision model's value"


def values_by_outcome(found: Sequence[DecisionValues]) -> go.Figure:
    """Histograms of the values of accepted and of rejected candidates, a row a decision model."""
    first = found[0]
    fig = base_figure(
        f"Of {first.kind.upper()}'s values for accepted and for rejected candidates of "
        f"{first.draft}, {first.overlap:.0%} overlap",
        ABOUT[0].upper() + ABOUT[1:] + ", on prompts that it was not trained on. Drafting stops "
        "below the dashed line.",
        120 + 190 * len(found),
        make_subplots(len(found), 1, shared_xaxes=True, vertical_spacing=0.09),
    )
    for row, each in enumerate(found, start=1):
        shares = each.shares()
        for outcome, colour in OUTCOMES.items():
            fig.add_bar(
                x=(shares["low"] + shares["high"]) / 2, y=shares[outcome], name=outcome,
                width=shares["high"] - shares["low"], legendgroup=outcome, row=row, col=1,
                showlegend=row == 1, opacity=0.62, marker={"color": colour, "line": {"width": 0}},
                hovertemplate=f"{outcome}: %{{y:.1%}} around %{{x:.3f}}<extra></extra>",
            )  # fmt: skip
        fig.add_vline(x=THRESHOLD, line=DASHED, row=row, col=1)
        title = f"{each.kind}, {each.draft}"
        fig.update_yaxes(title_text=title, tickformat=".0%", row=row, col=1)
    fig.update_xaxes(title_text="value", row=len(found), col=1)
    return fig.update_layout(barmode="overlay")


def values_svg(found: Sequence[DecisionValues], bins: int = 5) -> str:
    """The same of the first decision model in `bins` of equal width, as an SVG file."""
    each = found[0]
    shares = each.shares()
    edges = (shares["low"] * bins + 1e-9).astype(int)
    grouped = shares.groupby(edges)[list(OUTCOMES)].sum()
    bars = [
        SvgBar(
            f"{place / bins:.1f}–{(place + 1) / bins:.1f}, {outcome}",
            outcome,
            share,
            share,
            share,
            f"{share:.0%}",
        )
        for place, row in grouped.iterrows()
        for outcome, share in row.items()
    ]
    return bars_svg(
        f"Values of {each.kind.upper()} by outcome, {each.draft}", ABOUT, bars, OUTCOMES
    )
