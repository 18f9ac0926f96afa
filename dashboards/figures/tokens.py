"""What a draft token's distribution says about its fate."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.look import DRAFT_COLOURS, MUTED, PARTS, base_figure
from specdec_core.recordings.confidence_products import by_confidence

KEPT, WASTED = PARTS["draft forwards, kept"], PARTS["draft forwards, thrown away"]


def entropy_table(tokens: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Mean entropy (nats) of accepted and rejected draft tokens (SVIP, Table 1) and the AUC of
    telling them apart by it; one row a draft.

    `tokens`, by draft, has a row for each position of the target's output with `entropy` and
    `accepted` (the token drafted there is the target's).
    """
    from specdec_core.drafting.heads.metrics import auc  # torch takes seconds to import

    rows = []
    for draft, frame in tokens.items():
        entropy, accepted = frame["entropy"].to_numpy(), frame["accepted"].to_numpy(bool)
        rows.append({
            "draft": draft,
            "accepted": float(entropy[accepted].mean()) if accepted.any() else np.nan,
            "rejected": float(entropy[~accepted].mean()) if not accepted.all() else np.nan,
            "accepted share": float(accepted.mean()),
            "AUC": auc(-entropy, accepted),
        })  # fmt: skip
    return pd.DataFrame(rows)


def entropy_by_outcome(tokens: Mapping[str, pd.DataFrame], bins: int = 40) -> go.Figure:
    """Distributions of the draft's entropy at accepted and at rejected tokens (SVIP, Table 1), a
    row for each draft, the means as lines. Columns as for :func:`entropy_table`."""
    table = entropy_table(tokens).set_index("draft")
    first = table.iloc[0]
    fig = base_figure(
        f"{table.index[0]} is unsure where it will be rejected: {first['rejected']:.2f} nats of "
        f"entropy there, {first['accepted']:.2f} where it is accepted",
        "Share of the accepted and of the rejected draft tokens by the entropy of the "
        "distribution that they were drawn from, at every position of the target's output. "
        "Lines are means; the less the two overlap, the better a threshold can work.",
        150 + 210 * len(table),
        make_subplots(rows=len(table), cols=1, shared_xaxes=True, vertical_spacing=0.17),
    )
    last = max(float(np.quantile(frame["entropy"], 0.998)) for frame in tokens.values()) or 1.0
    edges = np.linspace(0, last, bins + 1)
    for row, (draft, frame) in enumerate(tokens.items(), start=1):
        for outcome, colour in (("accepted", KEPT), ("rejected", WASTED)):
            chosen = frame["entropy"][frame["accepted"].to_numpy(bool) == (outcome == "accepted")]
            if not len(chosen):
                continue
            count = np.histogram(np.minimum(chosen, last), edges)[0]
            share, mean = count / count.sum(), float(chosen.mean())
            fig.add_bar(
                x=(edges[:-1] + edges[1:]) / 2, y=share, width=last / bins, row=row, col=1,
                customdata=np.stack([edges[:-1], edges[1:], count], -1),
                name=outcome, legendgroup=outcome, showlegend=row == 1,
                marker={"color": colour, "opacity": 0.62, "line": {"width": 0}},
                hovertemplate=f"<b>{draft}, {outcome}</b><br>%{{y:.1%}} between "
                "%{customdata[0]:.2f} and %{customdata[1]:.2f} nats<br>%{customdata[2]:,} tokens"
                "<extra></extra>",
            )  # fmt: skip
            fig.add_vline(
                x=mean, row=row, col=1, line={"color": colour, "width": 2},
                annotation={
                    "text": f"{mean:.2f}", "font": {"size": 11, "color": MUTED},
                    "y": 1, "yanchor": "bottom", "showarrow": False, "xanchor": "center",
                },
            )  # fmt: skip
        auc_text = f", AUC {table['AUC'][draft]:.2f}"
        fig.update_yaxes(title_text=f"share, {draft}", tickformat=".0%", row=row, col=1)
        fig.update_xaxes(
            title_text=f"entropy of {draft} (nats){auc_text}", showticklabels=True, row=row, col=1
        )
    fig.update_layout(barmode="overlay", bargap=0)
    return fig


def acceptance_by_confidence(prefixes: Mapping[str, pd.DataFrame], bins: int = 20) -> go.Figure:
    """Share of drafted prefixes that are accepted as a whole against the product of their tokens'
    probabilities Π q(y) (Post-use, Fig. 2c and Eq. 6), and below how many there are.

    `prefixes`, by draft, has a row for each drafted prefix: `product`, `accepted`.
    """
    first = next(iter(prefixes), "")
    title = "The product of confidences tells how likely a whole draft is accepted"
    if first:
        sure_rows = prefixes[first]["product"] >= 0.5
        sure, unsure = prefixes[first][sure_rows], prefixes[first][~sure_rows]
        if len(sure) and len(unsure):
            title = (
                f"A draft of {first} whose confidences multiply to 0.5 or more is accepted as a "
                f"whole in {sure['accepted'].mean():.0%} of cases, one below in "
                f"{unsure['accepted'].mean():.0%}"
            )
    fig = base_figure(
        title,
        "Every start in the target's output and every draft length, put into bins of equal width "
        "by Π q(y). On the dashed line the product is the acceptance rate itself.",
        560,
        make_subplots(
            rows=2, cols=1, shared_xaxes=True, row_heights=[0.72, 0.28], vertical_spacing=0.13
        ),
    )
    fig.add_scatter(
        x=[0, 1], y=[0, 1], mode="lines", line={"color": MUTED, "width": 1.2, "dash": "dash"},
        name="product = acceptance", hoverinfo="skip", row=1, col=1,
    )  # fmt: skip
    edges = np.linspace(0, 1, bins + 1)
    for (draft, drafted), colour in zip(prefixes.items(), cycle(DRAFT_COLOURS), strict=False):
        table = by_confidence(drafted, bins)
        common = {
            "name": draft,
            "legendgroup": draft,
            "customdata": table[["low", "high", "count"]],
        }
        where = "product %{customdata[0]:.2f}–%{customdata[1]:.2f}"
        fig.add_scatter(
            x=table["product"], y=table["acceptance"], mode="lines+markers", row=1, col=1,
            line={"color": colour, "width": 2.2}, marker={"size": 7, "color": colour},
            hovertemplate=f"<b>{draft}</b><br>{where}<br>%{{y:.1%}} of %{{customdata[2]:,}} "
            "prefixes accepted<extra></extra>", **common,
        )  # fmt: skip
        fig.add_bar(
            x=(table["low"] + table["high"]) / 2, y=table["count"], row=2, col=1,
            marker={"color": colour, "line": {"width": 0}}, showlegend=False,
            hovertemplate=f"<b>{draft}</b><br>{where}<br>%{{y:,}} prefixes<extra></extra>",
            **common,
        )  # fmt: skip
    fig.update_xaxes(range=[-0.02, 1.02], showticklabels=True, tickvals=edges[:: max(1, bins // 5)])
    fig.update_xaxes(title_text="product of the confidences Π q(y) (mean of the bin)", row=1, col=1)
    fig.update_xaxes(title_text="product of the confidences Π q(y)", row=2, col=1)
    fig.update_yaxes(title_text="accepted as a whole", tickformat=".0%", row=1, col=1)
    fig.update_yaxes(title_text="prefixes", nticks=4, row=2, col=1)
    fig.update_layout(barmode="group", bargap=0.12)
    return fig
