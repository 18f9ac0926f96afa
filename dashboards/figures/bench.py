"""The benchmark's bars."""

from __future__ import annotations

import plotly.graph_objects as go

from dashboards.look import DASHED, OTHER_COLOURS, base_figure, intervals
from specdec_core.evidence.bench.result import BenchResult
from specdec_core.measure.comparison import OURS, over

COLOURS = {OURS: "#1272b4", "transformers": "#e6860f", "vllm": "#2fb074"}


def bench_figure(result: BenchResult, temperature: float) -> go.Figure:
    """All contestants at a temperature, by group: speed over our autoregressive decoding."""
    baseline = result.autoregressive(temperature)
    rows = [(row, over(row, baseline or row)) for row in result.at(temperature)]
    rows.sort(key=lambda pair: pair[1].value)
    fig = base_figure(
        f"Speed at temperature {temperature:g}",
        "times as fast as this engine's autoregressive decoding, with 95 % intervals",
        150 + 26 * len(rows),
    )
    spare = iter(OTHER_COLOURS * len(result.groups))
    for group in result.groups:
        members = [(row, ratio) for row, ratio in rows if row.group == group]
        values = [ratio.value for _, ratio in members]
        fig.add_bar(
            orientation="h", y=[row.name for row, _ in members], x=values, name=group,
            error_x=intervals(values, *zip(*((r.low, r.high) for _, r in members), strict=True)),
            marker={"color": COLOURS.get(group) or next(spare), "line": {"width": 0}},
            customdata=[row.tokens_per_second for row, _ in members],
            hovertemplate="<b>%{y}</b><br>%{x:.2f}×, %{customdata:.0f} tokens/s<extra></extra>",
        )  # fmt: skip
    order = [row.name for row, _ in rows]
    fig.update_yaxes(categoryorder="array", categoryarray=order, showgrid=False)
    fig.update_xaxes(title_text="times our autoregressive decoding", rangemode="tozero")
    fig.add_vline(x=1, line=DASHED)
    return fig.update_layout(bargap=0.25)
