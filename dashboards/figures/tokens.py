"""Whether a draft model's entropy tells which candidate tokens are rejected."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.look import PARTS, base_figure

KEPT, WASTED = PARTS["draft forwards, kept"], PARTS["draft forwards, thrown away"]
BINS = 40


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


def entropy_by_outcome(tokens: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Distributions of the draft's entropy at accepted and at rejected tokens (SVIP, Table 1), a
    row for each draft, with a line at each mean. Columns as for :func:`entropy_table`."""
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
    edges = np.linspace(0, last, BINS + 1)
    for row, (draft, frame) in enumerate(tokens.items(), start=1):
        for outcome, colour in (("accepted", KEPT), ("rejected", WASTED)):
            chosen = frame["entropy"][frame["accepted"].to_numpy(bool) == (outcome == "accepted")]
            if not len(chosen):
                continue
            count = np.histogram(np.minimum(chosen, last), edges)[0]
            fig.add_bar(
                x=(edges[:-1] + edges[1:]) / 2, y=count / count.sum(), row=row, col=1,
                customdata=count, name=outcome, legendgroup=outcome, showlegend=row == 1,
                marker={"color": colour, "opacity": 0.62, "line": {"width": 0}},
                hovertemplate=f"<b>{draft}, {outcome}</b><br>%{{y:.1%}} at %{{x:.2f}} nats<br>"
                "%{customdata:,} tokens<extra></extra>",
            )  # fmt: skip
            mean = float(chosen.mean())
            fig.add_vline(x=mean, row=row, col=1, line={"color": colour, "width": 2})
        fig.update_yaxes(title_text=f"share, {draft}", tickformat=".0%", row=row, col=1)
        fig.update_xaxes(
            title_text=f"entropy of {draft} (nats), AUC {table['AUC'][draft]:.2f}",
            showticklabels=True, row=row, col=1,
        )  # fmt: skip
    return fig.update_layout(barmode="overlay", bargap=0)
