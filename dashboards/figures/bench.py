"""The benchmark's bars, on a page and as an SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from dashboards.figures.svg import SvgBar, bars_svg
from dashboards.look import DASHED, OTHER_COLOURS, base_figure, intervals
from specdec_core.evidence.bench.result import BenchResult, over
from specdec_core.measure.comparison import OURS

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


def bench_svg(result: BenchResult, temperature: float) -> str:
    """The same as an SVG file."""
    drawn = [
        SvgBar(
            b.name, b.group, b.ratio, b.low, b.high, f"{b.ratio:.2f}× · {b.tokens_per_second:.0f}/s"
        )
        for b in bars(result, temperature)
    ]
    colours = {group: colour(group, result.groups) for group in result.groups}
    return bars_svg(f"Speed at temperature {temperature:g}", SUBTITLE, drawn, colours, one=True)
