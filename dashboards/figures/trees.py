"""Token trees: what a shape is worth, and what the planner makes of acceptance rates."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.look import DRAFT_COLOURS, MUTED, OTHER_COLOURS, base_figure, scaled, style
from dashboards.ranking import draft_of, drafting
from specdec_core.drafting.tree.settings import TreeSettings
from specdec_core.search.results import METRIC, SweepResult
from specdec_core.studies.trees import CHAIN, GRID, PLANNED, PLANNED_K, TreeComparison

HEAD = 2  # levels of a tree that name its row, the others name its column
MOST_ROWS, MOST_COLUMNS = 24, 30
MOST_WORDS = 16  # cells beside each other with a number in them
LEAST_TREES = 4  # fewer are no map
SLOW_TO_FAST = [[0.0, "#f0ece4"], [0.5, "#8fb4dd"], [1.0, "#2c5fae"]]
NONE = "–"

Branching = tuple[int, ...]


def trees_frame(result: SweepResult) -> pd.DataFrame:
    """One row a k-configuration of a sweep: `draft`, `branching`, `nodes`, `mat`, `speedup` (the
    estimate, which all have)."""
    rows = []
    for trial in drafting(result):
        drafter = trial.configuration.drafter
        if not isinstance(drafter, TreeSettings) or not trial.finished:
            continue
        if all(isinstance(count, int) for count in drafter.branching):
            rows.append({
                "draft": draft_of(result, trial),
                "branching": drafter.branching,
                "nodes": drafter.nodes,
                "mat": trial.metrics["mat"],
                "speedup": trial.metrics[METRIC],
            })  # fmt: skip
    columns = ["draft", "branching", "nodes", "mat", "speedup"]
    return pd.DataFrame(rows, columns=columns).drop_duplicates(["draft", "branching"])


def tree_heatmap(frame: pd.DataFrame) -> go.Figure:
    """Speed over k-configurations (improved MCSD, Fig. 4), a panel for each draft. Takes the
    columns of :func:`trees_frame`; of many shapes, the rows and columns with the fastest are
    drawn."""
    drafts = list(dict.fromkeys(frame["draft"]))
    title = "Speed of tree configurations"
    if len(frame):
        best = frame.iloc[frame["speedup"].argmax()]
        shape, draft = _shape(best["branching"]), best["draft"]
        title = f"The fastest k-configuration is {shape} with {draft}: ≈ {best['speedup']:.2f}×"
    panels = [_panel(frame[frame["draft"] == draft]) for draft in drafts]
    rows = max((len(panel.heads) for panel in panels), default=1)
    fig = base_figure(
        title,
        f"Estimated speedup over autoregressive decoding. A row is the branching of the first "
        f"{HEAD} levels, a column that of the levels below; empty cells were not tried, for the "
        "budget of nodes among other reasons. Dark is fast.",
        150 + 24 * max(rows, 6),
        make_subplots(rows=1, cols=max(len(drafts), 1), horizontal_spacing=0.12),
    )
    for i, (draft, panel) in enumerate(zip(drafts, panels, strict=True), start=1):
        tried = frame[frame["draft"] == draft].set_index("branching")
        hover = [[_cell(tried, head, rest) for rest in panel.rests] for head in panel.heads]
        few = len(panel.rests) * len(drafts) <= MOST_WORDS
        fig.add_heatmap(
            z=panel.speedups, x=list(map(_shape, panel.rests)), y=list(map(_shape, panel.heads)),
            customdata=hover, hovertemplate="%{customdata}<extra></extra>", xgap=1, ygap=1,
            text=[[f"{v:.2f}" if np.isfinite(v) else "" for v in row] for row in panel.speedups],
            texttemplate="%{text}" if few else None,
            name=draft, row=1, col=i, coloraxis="coloraxis", hoverongaps=False,
        )  # fmt: skip
        fig.update_xaxes(
            title_text=f"levels below, {draft}", type="category", tickangle=-60, row=1, col=i
        )
        fig.update_yaxes(
            title_text=f"first {HEAD} levels", type="category", autorange="reversed", row=1, col=i
        )
    return scaled(fig, SLOW_TO_FAST, "speedup")


class _Panel(NamedTuple):
    heads: list[Branching]  # first levels, from top to bottom
    rests: list[Branching]  # levels below, from left to right
    speedups: np.ndarray  # (heads, rests), NaN where nothing was tried


def _panel(frame: pd.DataFrame) -> _Panel:
    known = frame.assign(
        head=[b[:HEAD] for b in frame["branching"]], rest=[b[HEAD:] for b in frame["branching"]]
    )
    for part, most in (("head", MOST_ROWS), ("rest", MOST_COLUMNS)):
        fastest = known.groupby(part)["speedup"].max().nlargest(most)
        known = known[known[part].isin(fastest.index)]
    heads = sorted(set(known["head"]))
    rests = sorted(set(known["rest"]), key=lambda rest: (len(rest), rest))
    speedups = np.full((len(heads), len(rests)), np.nan)
    for row in known.itertuples():
        speedups[heads.index(row.head), rests.index(row.rest)] = row.speedup
    return _Panel(heads, rests, speedups)


def _shape(branching: Branching) -> str:
    return "·".join(map(str, branching)) or NONE


def _cell(tried: pd.DataFrame, head: tuple[int, ...], rest: Branching) -> str:
    branching = (*head, *rest)
    if branching not in tried.index:
        return ""
    tree = tried.loc[[branching]].iloc[0]
    return (
        f"<b>{_shape(branching)}</b>, {tree['nodes']} nodes<br>≈ {tree['speedup']:.3f}×, "
        f"{tree['mat']:.2f} tokens a round"
    )


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
