"""A flame graph: which functions the time was spent in, and who called them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import plotly.graph_objects as go

from dashboards.look import DRAFT_COLOURS, MUTED, OTHER_COLOURS, TARGET_COLOUR, base_figure
from specdec_core.measure.time_shares import Stack

# Functions with less than this share of the time are left out: they would be too narrow to read.
LEAST = 0.002

# Colours by the beginning of the module's name; the first that fits counts.
COLOURS = {
    "specdec_core.models.runner": TARGET_COLOUR,
    "specdec_core.models.compiled": TARGET_COLOUR,
    "torch": DRAFT_COLOURS[0],
    "transformers": DRAFT_COLOURS[1],
    "specdec_core.drafting.policies": OTHER_COLOURS[1],
    "specdec_core.drafting": OTHER_COLOURS[0],
    "specdec_core": OTHER_COLOURS[4],
}


def draw_stacks(stacks: Mapping[Stack, float], what: str = "decoding") -> go.Figure:
    """The seconds of stacks that :func:`specdec_core.measure.time_shares.sample_stacks` saw. A
    click on a function shows it alone."""
    total = sum(stacks.values())
    seconds: dict[Stack, float] = defaultdict(float)
    for stack, elapsed in stacks.items():
        for depth in range(len(stack) + 1):
            seconds[stack[:depth]] += elapsed
    # Callers come before those they call, as plotly wants them.
    shown = sorted((s for s, elapsed in seconds.items() if elapsed >= LEAST * total), key=len)
    fig = base_figure(
        f"Where the time of {what} goes, function by function",
        f"{total:.2f} s, looked at every millisecond. As wide as a function is the share of the "
        "time that it and those it called were seen for; click to zoom.",
        620,
    )
    fig.add_icicle(
        ids=[_id(stack) for stack in shown],
        labels=[_label(stack) for stack in shown],
        parents=[_id(stack[:-1]) if stack else "" for stack in shown],
        values=[seconds[stack] for stack in shown],
        customdata=[
            [stack[-1] if stack else what, seconds[stack] / (total or 1)] for stack in shown
        ],
        branchvalues="total",
        sort=False,
        tiling={"orientation": "v"},
        marker={"colors": [_colour(stack) for stack in shown]},
        hovertemplate="<b>%{customdata[0]}</b><br>%{value:.3f} s, %{customdata[1]:.1%}"
        "<extra></extra>",
    )
    return fig


def _id(stack: Stack) -> str:
    return "\n".join(("all", *stack))


def _label(stack: Stack) -> str:
    return stack[-1].partition(":")[2] if stack else "all"


def _colour(stack: Stack) -> str:
    module = stack[-1] if stack else ""
    return next((colour for prefix, colour in COLOURS.items() if module.startswith(prefix)), MUTED)
