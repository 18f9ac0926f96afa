"""The simulation of load held against live runs."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.look import ARM_COLOURS, DASHED, MUTED, base_figure

MEASURES = {"tpot": "median time per output token, ms", "ttft": "95th percentile of TTFT, ms"}


def simulated_against_live(table: pd.DataFrame, value: str) -> go.Figure:
    """Live over simulated measures of :meth:`specdec_core.search.load.result.LoadChoice.table`, a
    point for each load and configuration; `value` names the objective."""
    axes = {"value": (value, 1.0)}
    axes |= {name: (label, 1e3) for name, label in MEASURES.items()}
    fig = make_subplots(1, len(axes), horizontal_spacing=0.08)
    base_figure(
        "Simulated against live",
        "Each point is a configuration at a load; on the dashed line the simulation is right, below"
        " it the live engine was slower in tokens and faster in times.",
        440,
        fig,
    )
    names = list(dict.fromkeys(table["configuration"]))
    for column, (name, (label, scale)) in enumerate(axes.items(), start=1):
        known = table[table[[name, f"{name}_simulated"]].notna().all(axis=1)]
        ours, theirs = scale * known[f"{name}_simulated"], scale * known[name]
        if known.empty:
            continue
        ends = [min(ours.min(), theirs.min()), max(ours.max(), theirs.max())]
        fig.add_scatter(
            x=ends, y=ends, mode="lines", line=DASHED, showlegend=False, hoverinfo="skip",
            name="equal", row=1, col=column,
        )  # fmt: skip
        for place, configuration in enumerate(names):
            mine = known["configuration"] == configuration
            colour = ARM_COLOURS[(place - 1) % len(ARM_COLOURS)] if place else MUTED
            fig.add_scatter(
                x=ours[mine], y=theirs[mine], text=known["load"][mine], name=configuration,
                legendgroup=configuration, showlegend=column == 1, mode="markers",
                marker={"color": colour, "size": 9},
                hovertemplate=f"<b>{configuration}</b>, %{{text}}<br>simulated %{{x:.3g}},"
                " live %{y:.3g}<extra></extra>",
                row=1, col=column,
            )  # fmt: skip
        fig.update_xaxes(title_text=f"{label}, simulated", row=1, col=column)
    fig.update_yaxes(title_text="live", col=1)
    return fig.update_xaxes(rangemode="tozero").update_yaxes(rangemode="tozero")
