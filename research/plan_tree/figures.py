"""What the planner of token trees makes of acceptance rates."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from dashboards.look import DRAFT_COLOURS, MUTED, OTHER_COLOURS, base_figure, style
from research.plan_tree.comparison import CHAIN, GRID, PLANNED, PLANNED_K, TreeComparison

_LOOKS = {  # of the kinds of a comparison: colour, dash, what the legend says
    CHAIN: (style("fixed").colour, "dot", "best chain"),
    GRID: (OTHER_COLOURS[0], "solid", "grid: best of all k-configurations"),
    PLANNED_K: (OTHER_COLOURS[0], "dash", "planned k-configuration"),
    PLANNED: (OTHER_COLOURS[1], "solid", "planned tree of any shape"),
}


def trees_by_budget(comparison: TreeComparison) -> go.Figure:
    """Speed of planned trees and of the grid's best over the nodes that a tree may have, replayed.
    The planner has seen acceptance rates and the profile, the grid's best was tried."""
    best, tried = comparison.best(PLANNED), comparison.best(GRID)
    ratio = best["speedup"] / tried["speedup"] - 1
    fig = base_figure(
        f"With {comparison.draft} the planned tree of {best['nodes']} nodes is {abs(ratio):.1%} "
        f"{'slower' if ratio < 0 else 'faster'} than the best k-configuration",
        "Estimated speedup over autoregressive decoding, from replayed counts and the profile. "
        "Planned trees were chosen by acceptance rates alone; the grid's best and the best chain "
        "by replaying all of them.",
        420,
    )
    for kind, (colour, dash, name) in _LOOKS.items():
        rows = comparison.budgets[comparison.budgets["kind"] == kind]
        hover = [
            f"<b>{row.shape}</b>, {row.nodes} nodes<br>{row.speedup:.3f}×, {row.mat:.2f} tokens a "
            f"round (planned for {row.expected:.2f})"
            for row in rows.itertuples()
        ]
        fig.add_scatter(
            x=rows["budget"], y=rows["speedup"], mode="lines+markers", name=name,
            line={"color": colour, "dash": dash, "width": 2}, marker={"size": 6},
            customdata=hover, hovertemplate="%{customdata}<extra></extra>",
        )  # fmt: skip
    fig.update_xaxes(title_text="nodes at most", type="log", tickvals=rows["budget"].tolist())
    fig.update_yaxes(title_text="estimated speedup")
    return fig


def acceptance_by_rank(comparison: TreeComparison) -> go.Figure:
    """How often the target's token is the draft's most likely one, its second, …"""
    rates = comparison.acceptance
    within = np.cumsum(rates)
    fig = base_figure(
        f"{comparison.draft} names the target's token first in {rates[0]:.0%} and among its first "
        f"four in {within[min(3, len(rates) - 1)]:.0%} of the places",
        "Share of the recorded places at which the target's token has this rank in the draft's "
        "distribution (bars), and this rank or a better one (line).",
        360,
    )
    ranks = np.arange(1, len(rates) + 1)
    colour = DRAFT_COLOURS[0]
    fig.add_bar(
        x=ranks, y=rates, name="this rank", marker={"color": colour, "line": {"width": 0}},
        hovertemplate="rank %{x}: %{y:.2%}<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(
        x=ranks, y=within, mode="lines+markers", name="this rank or better",
        line={"color": MUTED, "width": 2}, hovertemplate="within %{x}: %{y:.2%}<extra></extra>",
    )  # fmt: skip
    fig.update_xaxes(title_text="rank in the draft's distribution")
    fig.update_yaxes(title_text="share of places", tickformat=".0%", range=[0, 1.02])
    return fig
