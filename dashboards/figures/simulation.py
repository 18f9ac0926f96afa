"""The simulation of load held against live runs."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.look import ARM_COLOURS, DASHED, MUTED, base_figure


def simulated_against_live(
    table: pd.DataFrame, measures: Mapping[str, tuple[str, float]], load: str
) -> go.Figure:
    """Live over simulated values, a panel for each of `measures` and a point for each row of
    `table`, which has `configuration`, the column `load`, and each measure's column live and with
    `_simulated`. A measure has a label and the factor of its unit."""
    fig = make_subplots(1, len(measures), horizontal_spacing=0.08)
    base_figure(
        "Simulated against live",
        "Each point is a configuration at a load. On the dashed line the simulation is right; below"
        " it the live engine had fewer tokens a second, or shorter times.",
        440,
        fig,
    )
    names = list(dict.fromkeys(table["configuration"]))
    colours = dict(zip(names, [MUTED, *ARM_COLOURS * len(names)], strict=False))
    for column, (name, (label, scale)) in enumerate(measures.items(), start=1):
        known = table[table[[name, f"{name}_simulated"]].notna().all(axis=1)]
        simulated, live = scale * known[f"{name}_simulated"], scale * known[name]
        for configuration in names:
            own = known["configuration"] == configuration
            fig.add_scatter(
                x=simulated[own], y=live[own], text=known[load][own], name=configuration,
                legendgroup=configuration, showlegend=column == 1, mode="markers",
                marker={"color": colours[configuration], "size": 9}, row=1, col=column,
                hovertemplate=f"<b>{configuration}</b>, %{{text}}<br>simulated %{{x:.3g}},"
                " live %{y:.3g}<extra></extra>",
            )  # fmt: skip
        end = 1.05 * max([0.0, *simulated, *live])
        fig.add_shape(type="line", x0=0, y0=0, x1=end, y1=end, line=DASHED, row=1, col=column)
        fig.update_xaxes(title_text=f"{label}, simulated", row=1, col=column)
    fig.update_yaxes(title_text="live", col=1)
    return fig.update_xaxes(rangemode="tozero").update_yaxes(rangemode="tozero")
