"""The look of every figure: a colour and a symbol for each family, neutral colours, layout.

The families' colours keep apart under the common colour-vision deficiencies and on light and dark
grounds alike.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go


class Style(NamedTuple):
    name: str
    colour: str
    symbol: str

    @property
    def hollow(self) -> str:
        """The symbol without its filling."""
        plain = self.symbol.removesuffix("-dot").removesuffix("-open")
        return f"{plain}-open" + ("-dot" if self.symbol.endswith("-dot") else "")


# The neutral colours. The report replaces them by the colours of the reader's colour scheme.
INK, MUTED, PAPER = "#2b3038", "#7b828d", "#fefefe"

STYLES = {
    "fixed": Style("fixed K", "#1272b4", "circle"),
    "heuristic": Style("heuristic", "#e6860f", "square"),
    "confidence": Style("confidence", "#2fb074", "diamond"),
    "confidence_product": Style("confidence product", "#675b00", "diamond-tall"),
    "svip": Style("SVIP", "#f93443", "triangle-up"),
    "pre_cut": Style("pre-cut", "#84484d", "pentagon"),
    "specdecpp": Style("SpecDec++", "#5125fd", "hexagram"),
    "decision": Style("decision model", "#91a1ff", "triangle-down"),
    "prompt_lookup": Style("prompt lookup", "#b14fff", "cross"),
    "tree": Style("token tree", "#7800c0", "star-triangle-up"),
    "post_use": Style("Post-use", "#90d878", "hourglass"),
    "ucb": Style("UCBSpec", "#fca8e4", "hexagon"),
    "autoregressive": Style("autoregressive", "#8a8f98", "x"),
}
# Variants share the colour of their family: more colours than these could not be told apart.
STYLES |= {
    "lasting_heuristic": STYLES["heuristic"]._replace(name="lasting heuristic", symbol="square-x"),
    "break_even": STYLES["confidence_product"]._replace(name="break-even", symbol="arrow-up"),
    "fork": STYLES["tree"]._replace(name="fork", symbol="star-triangle-down"),
    "target_tree": STYLES["tree"]._replace(name="target's tree", symbol="star-diamond"),
    "target_fork": STYLES["tree"]._replace(name="target's fork", symbol="star-diamond-open"),
    "dynamic_tree": STYLES["tree"]._replace(name="dynamic tree", symbol="star-square"),
    "suffix": STYLES["prompt_lookup"]._replace(name="suffix", symbol="circle-cross"),
    "token_cache": STYLES["prompt_lookup"]._replace(name="token cache", symbol="diamond-cross"),
    "pearl": STYLES["post_use"]._replace(name="PEARL", symbol="arrow-bar-right"),
    "cascade": STYLES["post_use"]._replace(name="cascade", symbol="triangle-left"),
    "hybrid": STYLES["post_use"]._replace(name="hybrid", symbol="bowtie"),
    "schedule": STYLES["ucb"]._replace(name="schedule", symbol="square-dot"),
    "exp3": STYLES["ucb"]._replace(name="EXP3Spec", symbol="hexagon2"),
    "ucb_time": STYLES["ucb"]._replace(name="UCBSpec by time", symbol="circle-x"),
    "exp3_time": STYLES["ucb"]._replace(name="EXP3Spec by time", symbol="diamond-x"),
    "thompson": STYLES["ucb"]._replace(name="Thompson sampling", symbol="hexagon-dot"),
    "thompson_time": STYLES["ucb"]._replace(name="Thompson by time", symbol="hexagon2-dot"),
    "oracle": Style("oracle", MUTED, "star"),
}
# Of families that are not listed above.
OTHER_COLOURS = ["#29b6d8", "#e56fae", "#8a7a00", "#8c4a2f", "#5560c0"]
OTHER_SYMBOLS = ["asterisk-open", "hash-open", "y-up-open", "y-down-open", "diamond-x-open"]
GRID = "rgba(128,134,145,0.22)"
TARGET_COLOUR = "#5d6a82"
DRAFT_COLOURS = [STYLES["fixed"].colour, STYLES["heuristic"].colour, *OTHER_COLOURS]
# Of contestants or a bandit's arms, in their order.
ARM_COLOURS = [*DRAFT_COLOURS, STYLES["confidence"].colour, STYLES["pre_cut"].colour]
DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"]  # of groups of contestants
PART_COLOURS = {  # of the time of a token
    "target forwards": TARGET_COLOUR,
    "draft forwards, kept": "#35a596",
    "draft forwards, thrown away": "#ee8f5b",
    "rest of the round": "#9fa8b6",
}
DASHED = {"color": MUTED, "width": 1.5, "dash": "dash"}  # where two things would be equal
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def style(family: str) -> Style:
    """The look of a family, the same in every figure of every report."""
    if family in STYLES:
        return STYLES[family]
    pick = sum(family.encode()) % len(OTHER_COLOURS)
    return Style(family.replace("_", " "), OTHER_COLOURS[pick], OTHER_SYMBOLS[pick])


def family_order(family: str) -> tuple[int, str]:
    """Sorts families as they are listed above, unknown ones last."""
    known = list(STYLES)
    return (known.index(family) if family in known else len(known), family)


def evenly(count: int, most: int) -> np.ndarray:
    """Indices of the items to draw, of `count`: all, or `most` of them, evenly spread."""
    if count <= most:
        return np.arange(count)
    return np.linspace(0, count - 1, most).astype(int)


def base_figure(title: str, subtitle: str, height: int, fig: go.Figure | None = None) -> go.Figure:
    """An empty figure in the common look. The report shows title and subtitle as HTML."""
    fig = fig or go.Figure()
    axis = {
        "gridcolor": GRID, "zeroline": False, "linecolor": GRID, "automargin": True,
        "title": {"standoff": 12, "font": {"size": 13}},
    }  # fmt: skip
    fig.update_layout(
        template="none",
        title={
            "text": title, "subtitle": {"text": subtitle}, "x": 0, "xref": "paper",
            "yref": "container", "y": 0.97, "yanchor": "top",
        },
        height=height,
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        font={"family": FONT, "size": 13, "color": INK},
        margin={"l": 12, "r": 20, "t": 80, "b": 12},
        legend={
            "orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom",
            "traceorder": "normal",
        },
        hoverlabel={"font": {"family": FONT}, "align": "left"},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": MUTED, "activecolor": TARGET_COLOUR},
        hovermode="closest",
    )  # fmt: skip
    fig.update_xaxes(**axis)
    fig.update_yaxes(**axis)
    return fig
