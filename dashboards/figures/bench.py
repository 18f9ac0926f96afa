"""The benchmark's bars: on a page, and as an SVG file that needs no browser to be made."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import NamedTuple

import plotly.graph_objects as go

from dashboards.look import DASHED, INK, MUTED, OTHER_COLOURS, PAPER, base_figure, intervals
from dashboards.templating import render
from specdec_core.studies.bench.result import BenchResult, over
from specdec_core.studies.comparison import OURS

COLOURS = {OURS: "#1272b4", "transformers": "#e6860f", "vllm": "#2fb074"}


class Bar(NamedTuple):
    """A contestant: how many times as fast as our autoregressive decoding it is."""

    name: str
    group: str
    ratio: float
    low: float
    high: float
    tokens_per_second: float


def bars(result: BenchResult, temperature: float) -> list[Bar]:
    """The contestants at a temperature, the fastest first."""
    baseline = result.autoregressive(temperature)
    ratios = ((row, over(row, baseline or row)) for row in result.at(temperature))
    unsorted = (
        Bar(row.name, row.group, ratio.value, ratio.low, ratio.high, row.tokens_per_second)
        for row, ratio in ratios
    )
    return sorted(unsorted, key=lambda bar: -bar.ratio)


def colour(group: str, groups: Sequence[str]) -> str:
    others = [name for name in groups if name not in COLOURS]
    return COLOURS.get(group) or OTHER_COLOURS[others.index(group) % len(OTHER_COLOURS)]


def bench_figure(result: BenchResult, temperature: float) -> go.Figure:
    """All contestants at a temperature, by who made them."""
    shown = bars(result, temperature)
    title = f"Speed at temperature {temperature:g}"
    fig = base_figure(title, SUBTITLE, 150 + 26 * len(shown))
    for group in result.groups:
        members = [bar for bar in shown if bar.group == group]
        fig.add_bar(
            orientation="h",
            y=[bar.name for bar in members],
            x=[bar.ratio for bar in members],
            error_x=intervals(
                [bar.ratio for bar in members],
                [bar.low for bar in members],
                [bar.high for bar in members],
            ),
            name=group,
            marker={"color": colour(group, result.groups), "line": {"width": 0}},
            customdata=[bar.tokens_per_second for bar in members],
            hovertemplate="<b>%{y}</b><br>%{x:.2f}×, %{customdata:.0f} tokens/s<extra></extra>",
        )  # fmt: skip
    order = [bar.name for bar in reversed(shown)]
    fig.update_yaxes(categoryorder="array", categoryarray=order, showgrid=False)
    fig.update_xaxes(title_text="times our autoregressive decoding", rangemode="tozero")
    fig.add_vline(x=1, line=DASHED)
    return fig.update_layout(bargap=0.25)


SUBTITLE = "times as fast as this engine's autoregressive decoding, with 95 % intervals"
_ROW, _TOP, _BARS, _LETTER = 22, 58, 440, 7.0  # pixels


def bench_svg(result: BenchResult, temperature: float) -> str:
    """The same as an SVG file."""
    shown = bars(result, temperature)
    most = max((bar.high for bar in shown if not isnan(bar.high)), default=1.0)
    names = round(24 + _LETTER * max(len(bar.name) for bar in shown))
    scale = _BARS / max(most, 1.0)
    return render(
        "bars.jinja",
        title=f"Speed at temperature {temperature:g}",
        subtitle=SUBTITLE,
        width=names + _BARS + 120,
        height=_TOP + _ROW * len(shown) + 14,
        names=names,
        one=names + scale,
        top=_TOP,
        row=_ROW,
        ink=INK,
        muted=MUTED,
        paper=PAPER,
        groups=[(group, colour(group, result.groups)) for group in result.groups],
        bars=[
            {
                "name": bar.name,
                "colour": colour(bar.group, result.groups),
                "width": scale * bar.ratio,
                "low": names + scale * bar.low,
                "high": names + scale * bar.high,
                "label": f"{bar.ratio:.2f}× · {bar.tokens_per_second:.0f}/s",
            }
            for bar in shown
        ],
    )
