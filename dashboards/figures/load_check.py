"""The simulation of load against the live engine."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.look import ARM_COLOURS, DASHED, MUTED, base_figure

# Of tables with clients and of those at rates: the column, its factor, and what it is.
PANELS = (
    ("tokens_per_second", "tokens_per_second", 1.0, "tokens/s"),
    ("tpot", "tpot", 1e3, "median TPOT, ms"),
    ("ttft", "ttft_p95", 1e3, "TTFT, ms"),
)


def agreement_figure(clients: pd.DataFrame, rates: pd.DataFrame) -> go.Figure:
    """Simulated over live: throughput, median TPOT, and TTFT (median with clients, 95th percentile
    at rates), of the tables of :mod:`specdec_core.search.load.check`."""
    fig = make_subplots(1, 3, horizontal_spacing=0.08)
    base_figure(
        "Simulated against live",
        "Circles: clients that wait for their answers; diamonds: requests that come at random. TTFT"
        " is the median for the former, the 95th percentile for the latter.",
        420,
        fig,
    )
    names = list(dict.fromkeys([*clients["configuration"], *rates["configuration"]]))
    colours = dict(zip(names, [MUTED, *ARM_COLOURS * len(names)], strict=False))
    for panel, (of_clients, of_rates, factor, label) in enumerate(PANELS, start=1):
        loads = clients["clients"].map("{} clients".format)
        shares = [f"{s:.0%}, {r:.3g}/s" for s, r in zip(rates["share"], rates["rate"], strict=True)]
        highest = 0.0
        for table, column, texts, symbol in (
            (clients, of_clients, loads, "circle"),
            (rates, of_rates, pd.Series(shares, index=rates.index), "diamond"),
        ):
            highest = max(highest, table[column].max(), table[f"{column}_simulated"].max())
            for name in names:
                rows = table["configuration"] == name
                fig.add_scatter(
                    x=factor * table.loc[rows, column],
                    y=factor * table.loc[rows, f"{column}_simulated"],
                    text=texts[rows], name=name, legendgroup=name,
                    showlegend=panel == 1 and symbol == "circle", mode="markers",
                    marker={"color": colours[name], "symbol": symbol, "size": 9},
                    row=1, col=panel,
                    hovertemplate=f"<b>{name}</b>, %{{text}}<br>live %{{x:.4~g}},"
                    " simulated %{y:.4~g}<extra></extra>",
                )  # fmt: skip
        end = 1.05 * factor * highest
        fig.add_shape(type="line", x0=0, y0=0, x1=end, y1=end, line=DASHED, row=1, col=panel)
        fig.update_xaxes(title_text=f"{label}, live", range=[0, end], row=1, col=panel)
        fig.update_yaxes(title_text="simulated", range=[0, end], row=1, col=panel)
    return fig
