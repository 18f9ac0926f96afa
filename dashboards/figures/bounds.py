"""SVIP's theory on recorded tokens: how far entropies bound the acceptance probability."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboards.look import DASHED, INK, MUTED, STYLES, base_figure, evenly
from specdec_core.cost import (
    RatioFit,
    approximation_bound,
    bretagnolle_huber_bound,
    entropy_ratio,
    oracle_bound,
)

PAPER_C = 0.18  # SVIP, Fig. 4
TRUTH = "acceptance probability β"


def acceptance_bounds(
    tokens: pd.DataFrame, draft: str, c: float = PAPER_C, bins: int = 24, most: int = 1500
) -> go.Figure:
    """The acceptance probability β = Σ min(p, q) and its lower bounds against the draft's entropy
    (SVIP, Fig. 4): Pinsker's with the true cross entropy (Eq. 4), Bretagnolle and Huber's
    (Eq. 12), and 1 − √(c·H_q), which needs the draft alone (Eq. 6).

    `tokens` has `entropy`, `cross_entropy` (H_{q,p}, nats) and `overlap` (β). Lines are means over
    bins that hold as many tokens each; of more than `most` tokens as many are drawn as points.
    """
    entropy, cross, beta = (
        tokens[name].to_numpy(np.float64) for name in ("entropy", "cross_entropy", "overlap")
    )
    curves = {
        TRUTH: (beta, INK, "solid"),
        "Pinsker, true H(q, p)": (
            np.maximum(oracle_bound(entropy, cross), 0), STYLES["fixed"].colour, "solid"
        ),
        "Bretagnolle–Huber": (
            bretagnolle_huber_bound(entropy, cross), STYLES["confidence"].colour, "dash"
        ),
    }  # fmt: skip
    alone = np.maximum(approximation_bound(entropy, c), 0)
    below = float(np.mean(alone <= beta + 1e-6))
    fig = base_figure(
        f"1 − √({c:g}·H) stays below the true acceptance probability at {below:.0%} of {draft}'s "
        "tokens",
        f"Points: β at single tokens of {draft}. Lines: means at equal entropy. The two bounds "
        "from the true cross entropy always hold, but need the target; SVIP's needs the draft "
        "alone. Bounds below 0 say nothing and count as 0.",
        500,
    )
    chosen = evenly(len(entropy), most)
    fig.add_scatter(
        x=entropy[chosen], y=beta[chosen], mode="markers", name="tokens", hoverinfo="skip",
        marker={"size": 4, "color": MUTED, "opacity": 0.3},
    )  # fmt: skip
    groups = np.array_split(np.argsort(entropy, kind="stable"), min(bins, max(len(entropy), 1)))
    middle = [float(entropy[group].mean()) for group in groups]
    for name, (values, colour, dash) in curves.items():
        fig.add_scatter(
            x=middle, y=[float(values[group].mean()) for group in groups], mode="lines+markers",
            name=name, line={"color": colour, "width": 2.4, "dash": dash}, marker={"size": 5},
            hovertemplate=f"<b>{name}</b><br>%{{y:.3f}} at %{{x:.2f}} nats<extra></extra>",
        )  # fmt: skip
    x = np.linspace(0, max(middle), 120)
    fig.add_scatter(
        x=x, y=np.maximum(approximation_bound(x, c), 0), mode="lines",
        name=f"draft alone, c = {c:g}", line={"color": STYLES["svip"].colour, "width": 2.4},
        hovertemplate="<b>1 − √(cH)</b><br>%{y:.3f} at %{x:.2f} nats<extra></extra>",
    )  # fmt: skip
    fig.update_xaxes(
        title_text=f"entropy of {draft}'s distribution H(q) (nats)", rangemode="tozero"
    )
    fig.update_yaxes(title_text="acceptance probability", range=[-0.02, 1.03])
    return fig


def ratio_of_entropies(
    tokens: pd.DataFrame, draft: str, c: float = PAPER_C, bins: int = 60
) -> go.Figure:
    """The distribution of γ = H_{q,p} / H_q with the shifted Gamma fitted to it (SVIP, App. C.2),
    and the 2c + 1 up to which 1 − √(c·H_q) is below Pinsker's bound (Eq. 8)."""
    entropy, cross = (tokens[name].to_numpy(np.float64) for name in ("entropy", "cross_entropy"))
    gamma = entropy_ratio(entropy, cross)
    gamma = gamma[np.isfinite(gamma)]
    fit = RatioFit.of(entropy, cross)
    edges = np.linspace(1, max(float(np.quantile(gamma, 0.95)), 2 * c + 1.2), bins + 1)
    share = np.histogram(gamma, edges)[0] / len(gamma)
    holds, fitted = float(np.mean(gamma <= 2 * c + 1)), float(fit.reliability(c))
    fig = base_figure(
        f"With c = {c:g} SVIP's bound is below Pinsker's at {holds:.0%} of {draft}'s tokens",
        f"γ = H(q, p) / H(q) at every position of the target's output, and 1 + Gamma(α, β) fitted "
        f"to it (α = {fit.shape:.2f}, β = {fit.rate:.2f}; by the fit {fitted:.0%}). Left of the "
        f"dashed line, 2c + 1, the approximation is on the safe side. "
        f"{np.mean(gamma > edges[-1]):.0%} of the tokens lie farther right.",
        420,
    )
    middle, width = (edges[:-1] + edges[1:]) / 2, edges[1] - edges[0]
    fig.add_bar(
        x=middle, y=share, width=width, name="tokens",
        marker={"color": STYLES["fixed"].colour, "opacity": 0.55, "line": {"width": 0}},
        hovertemplate="%{y:.1%} of the tokens at γ ≈ %{x:.2f}<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(
        x=middle, y=np.diff(fit.reliability((edges - 1) / 2)), mode="lines", name="1 + Gamma(α, β)",
        line={"color": STYLES["svip"].colour, "width": 2.4},
        hovertemplate="fitted: %{y:.1%} at γ ≈ %{x:.2f}<extra></extra>",
    )  # fmt: skip
    fig.add_vline(x=2 * c + 1, line=DASHED)
    fig.update_layout(bargap=0)
    fig.update_xaxes(title_text="γ, cross entropy over entropy")
    fig.update_yaxes(title_text="share of tokens", tickformat=".0%")
    return fig
