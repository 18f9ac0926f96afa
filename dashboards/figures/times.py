"""What forward passes take."""

from __future__ import annotations

import plotly.graph_objects as go

from dashboards.look import DRAFT_COLOURS, TARGET_COLOUR, base_figure
from specdec_core.search.results import SweepResult


def forward_times(result: SweepResult) -> go.Figure:
    """Milliseconds of one forward against its width n, target and drafts, measured and fitted."""
    profile = result.profile
    costs = {"target": profile.target}
    costs |= {
        name if "draft" in name else f"draft {name}": cost for name, cost in profile.drafts.items()
    }
    least = min(m.batch for cost in costs.values() for m in cost.measurements)
    widest = max((m.width for m in profile.target.measurements), default=1)
    one, many = profile.target.seconds(width=1), profile.target.seconds(width=widest)
    fig = base_figure(
        f"Verifying {widest} tokens at once takes the target {many / one:.2f} times as long as one",
        "Median time of one forward: dots are measured (larger: longer context), lines the fit "
        "that turns counts into estimated speedups.",
        440,
    )
    colours = [TARGET_COLOUR, *DRAFT_COLOURS]
    for (role, cost), colour in zip(costs.items(), colours * len(costs), strict=False):
        for batch in sorted({m.batch for m in cost.measurements}):
            points = [m for m in cost.measurements if m.batch == batch]
            name = role if batch == least else f"{role}, batch {batch}"
            contexts = sorted({m.context for m in points})
            middle = contexts[len(contexts) // 2]
            widths = list(range(1, max(m.width for m in points) + 1))
            shared = {
                "name": name, "legendgroup": name,
                "visible": True if batch == least else "legendonly",
            }  # fmt: skip
            fig.add_scatter(
                x=widths,
                y=[1e3 * cost.seconds(width=w, context=middle, batch=batch) for w in widths],
                mode="lines", line={"color": colour, "width": 2}, **shared,
                hovertemplate=f"<b>{name}</b> fit, context {middle}<br>n = %{{x:.0f}}: "
                f"%{{y:.2f}} ms<br>R² {cost.r2:.3f}<extra></extra>",
            )  # fmt: skip
            fig.add_scatter(
                x=[m.width for m in points], y=[1e3 * m.seconds for m in points],
                customdata=[m.context for m in points], mode="markers", showlegend=False, **shared,
                marker={
                    "color": colour, "size": [6 + 2 * contexts.index(m.context) for m in points],
                },
                hovertemplate=f"<b>{name}</b> measured<br>n = %{{x}}, context %{{customdata}}: "
                "%{y:.2f} ms<extra></extra>",
            )  # fmt: skip
    fig.update_xaxes(title_text="n, tokens in one forward", rangemode="tozero")
    fig.update_yaxes(title_text="time of a forward (ms)", rangemode="tozero")
    return fig
