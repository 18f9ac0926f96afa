"""What a fixed draft length wastes (Post-use & Pre-cut, Fig. 2a and 2b)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.figures.svg import SvgBar, bars_svg
from dashboards.look import DASHED, DRAFT_COLOURS, OTHER_COLOURS, base_figure
from specdec_core.studies.draft_reuse import DRAFT_CALL, DRAFTED, TARGET_CALL, BestLengths

SHOWN = 60  # rounds in a row
LEFT, RIGHT = "best draft length", "share of the rounds"
REUSED = "Phrases of earlier rounds that come again"
REUSED_ABOUT = "share of the calls after which a phrase of so many drafted tokens comes again"


def lengths_by_round(found: Sequence[BestLengths]) -> go.Figure:
    """λ*_local of consecutive rounds against λ*_global, and its distribution: a row a draft."""
    first = found[0]
    fig = base_figure(
        f"Of the rounds of {first.draft}, {first.shorter:.0%} want a shorter draft than the best "
        f"fixed length of {first.fixed}, {first.longer:.0%} a longer one",
        f"Left: the candidates that the target would accept, in the first {SHOWN} rounds. Right: "
        "over all rounds. Dashed: the best fixed length.",
        120 + 230 * len(found),
        make_subplots(len(found), 2, column_widths=[0.64, 0.36], vertical_spacing=0.16),
    )
    for row, (each, colour) in enumerate(zip(found, DRAFT_COLOURS, strict=False), start=1):
        lengths = each.rounds["length"]
        shown = each.rounds.head(SHOWN)
        fig.add_scatter(
            x=[*range(1, len(shown) + 1)], y=shown["length"], name=each.draft, row=row, col=1,
            mode="lines+markers", line={"color": colour, "width": 1.5, "shape": "hvh"},
            marker={"size": 5}, customdata=shown[["request", "round"]],
            hovertemplate="%{customdata[0]}, round %{customdata[1]}: %{y}<extra></extra>",
        )  # fmt: skip
        fig.add_hline(y=each.fixed, line=DASHED, row=row, col=1)
        shares = lengths.value_counts(normalize=True).sort_index()
        fig.add_bar(
            x=shares.index, y=shares, row=row, col=2, showlegend=False,
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate="%{x} tokens in %{y:.1%} of the rounds<extra></extra>",
        )  # fmt: skip
        fig.add_vline(x=each.fixed, line=DASHED, row=row, col=2)
        fig.update_yaxes(title_text=f"{LEFT}, {each.draft}", row=row, col=1)
        fig.update_yaxes(title_text=RIGHT, tickformat=".0%", row=row, col=2)
    fig.update_xaxes(title_text="round", row=len(found), col=1)
    fig.update_xaxes(title_text=LEFT, row=len(found), col=2)
    return fig.update_layout(showlegend=False)


def lengths_svg(found: Sequence[BestLengths]) -> str:
    """How often each length is the best, as an SVG file."""
    colours = {e.draft: colour for e, colour in zip(found, DRAFT_COLOURS, strict=False)}
    bars = []
    for each in found:
        shares = each.rounds["length"].clip(upper=20).value_counts(normalize=True).sort_index()
        for length, share in shares.items():
            name = f"{each.draft}, {length}{' or more' if length == 20 else ''}"
            bars.append(SvgBar(name, each.draft, share, share, share, f"{share:.1%}"))
    fixed = ", ".join(f"{each.fixed} with {each.draft}" for each in found)
    about = f"share of the rounds by the best draft length; the best fixed one is {fixed}"
    return bars_svg("Best draft length, round by round", about, bars, colours)


def recycled_share(found: Mapping[str, pd.DataFrame]) -> go.Figure:
    """How often phrases come again, by their length: a panel a kind of call, a line a draft and
    what the phrases are of."""
    calls = (DRAFT_CALL, TARGET_CALL)
    fig = base_figure(
        REUSED,
        REUSED_ABOUT[0].upper() + REUSED_ABOUT[1:] + ". Solid: of all drafted tokens; dotted: of "
        "those that were rejected alone.",
        420,
        make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.06),
    )
    for (draft, frame), colour in zip(found.items(), DRAFT_COLOURS, strict=False):
        for (call, of), rows in frame.groupby(["call", "of"], sort=False):
            fig.add_scatter(
                x=rows["tokens"], y=rows["share"], name=f"{draft}, {of}", row=1,
                col=calls.index(call) + 1, legendgroup=f"{draft} {of}",
                showlegend=call == DRAFT_CALL, mode="lines+markers",
                line={"color": colour, "width": 2, "dash": "solid" if of == DRAFTED else "dot"},
                hovertemplate="%{y:.1%} of the calls<extra></extra>",
            )  # fmt: skip
    for column, call in enumerate(calls, start=1):
        fig.update_xaxes(title_text=f"tokens of a phrase, after a {call}", dtick=1, col=column)
    return fig.update_yaxes(tickformat=".0%", rangemode="tozero")


def recycled_svg(found: Mapping[str, pd.DataFrame]) -> str:
    """The same of all drafted tokens, as an SVG file."""
    calls = (DRAFT_CALL, TARGET_CALL)
    bars = [
        SvgBar(
            f"{draft}, {row.call}, {row.tokens}",
            str(row.call),
            row.share,
            row.share,
            row.share,
            f"{row.share:.0%}",
        )
        for draft, frame in found.items()
        for row in frame[frame["of"] == DRAFTED].itertuples()
    ]
    return bars_svg(REUSED, REUSED_ABOUT, bars, dict(zip(calls, OTHER_COLOURS, strict=False)))
