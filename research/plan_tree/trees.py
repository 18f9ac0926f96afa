"""A heat map of token trees: the speed of each shape."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.look import INK, MUTED, base_figure

HEAD = 2  # levels of a tree that name its row; the levels below name its column
MOST_ROWS, MOST_COLUMNS = 24, 30
MOST_WORDS = 16  # cells beside each other with a number in them
SLOW_TO_FAST = [[0.0, "#f0ece4"], [0.5, "#8fb4dd"], [1.0, "#2c5fae"]]
NONE = "–"

Branching = tuple[int, ...]


def tree_heatmap(frame: pd.DataFrame) -> go.Figure:
    """Speed over k-configurations (improved MCSD, Fig. 4), a panel for each draft.

    `frame` has a row for each: `draft`, `branching`, `nodes`, `mat`, `speedup`. Of many shapes, the
    rows and columns with the fastest are drawn.
    """
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
    bar = {
        "title": {"text": "speedup", "font": {"color": MUTED}}, "thickness": 12,
        "tickfont": {"color": INK}, "outlinewidth": 0,
    }  # fmt: skip
    fig.update_layout(coloraxis={"colorscale": SLOW_TO_FAST, "colorbar": bar}, margin_r=70)
    return fig.update_xaxes(showgrid=False).update_yaxes(showgrid=False)


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
