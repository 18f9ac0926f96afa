"""What bandits lose against the best arm in hindsight, and which arms they choose meanwhile."""

from __future__ import annotations

from itertools import cycle
from typing import NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.look import ARM_COLOURS, DASHES, INK, MUTED, base_figure, evenly, legend_beside
from research.bandits.comparison import ArmComparison, BanditEntrant, settings_of
from research.bandits.regret import exp3_bound, hardness, ucb_bound

MOST_POINTS = 600
BOUNDS = {"ucb": "H L² log E[len]", "exp3": "L √(ST K log K)"}


class Bound(NamedTuple):
    """The order of a rule's regret (BanditSpec's theorems, whose constants are not printed) at each
    of its rounds, and the least constant with which it stays above the regret."""

    curve: np.ndarray
    constant: float


def bound_of(comparison: ArmComparison, bandit: BanditEntrant) -> Bound:
    """The paper's bound on a bandit's regret in rounds, with the arms' means as they are alone."""
    loss = comparison.regret(bandit)
    if settings_of(bandit.configuration).rule == "ucb":
        curve = ucb_bound(comparison.means, comparison.longest, loss.tokens)
    else:
        best = loss.spent - loss.regret
        curve = exp3_bound(len(comparison.means), comparison.longest, np.maximum(best, 0))
    # The first rounds say nothing: log E[len] begins at 0.
    later = curve > curve[-1] / 4
    constant = float(np.max(loss.regret[later] / curve[later], initial=0.0))
    return Bound(curve, max(constant, 0.0))


def regret_curves(comparison: ArmComparison, timed: bool = False) -> go.Figure:
    """Cumulative regret of each bandit, and of each arm alone, against the best arm in hindsight
    over the rounds: in rounds (stopping-time regret) or in seconds.

    In rounds, only bandits that are rewarded in tokens are drawn, if there are any. Each comes with
    the paper's bound, its order times the least constant that keeps it above the curve.
    """
    best = comparison.best(timed)
    unit = "s" if timed else "rounds"
    bandits = comparison.of("bandit")
    if not timed:
        bandits = [b for b in bandits if _counts_tokens(b)] or bandits
    totals = {b.name: comparison.regret(b, timed).total for b in bandits}
    least = min(totals, key=totals.__getitem__)
    modelled = " Times are modelled." if timed and comparison.modelled else ""
    fig = base_figure(
        f"{least} loses the least against the best arm in hindsight: "
        f"{_signed(totals[least], timed)} in {len(best.rounds)} of its rounds",
        f"{'Seconds' if timed else 'Rounds'} beyond those that {best.name} alone takes for the "
        f"same tokens, over a bandit's rounds; below 0 it is better than any single arm. Thin: the "
        f"other arms alone.{modelled}{'' if timed else ' ' + _explained(comparison)}",
        560,
    )
    colours = dict(zip((a.name for a in comparison.of("arm")), cycle(ARM_COLOURS), strict=False))
    longest = max(len(comparison.regret(b).tokens) for b in bandits)
    for arm in comparison.of("arm"):
        if arm is not best:
            loss = comparison.regret(arm, timed)
            pick = evenly(min(len(loss.regret), longest), MOST_POINTS)
            _line(
                fig, arm.name, pick, loss.regret, unit,
                {"color": colours[arm.name], "width": 1.2}, "arms",
            )  # fmt: skip
    for bandit, dash in zip(bandits, cycle(DASHES), strict=False):
        loss = comparison.regret(bandit, timed)
        pick = evenly(len(loss.regret), MOST_POINTS)
        line = {"color": INK, "width": 2.6, "dash": dash}
        _line(fig, bandit.name, pick, loss.regret, unit, line, "bandits")
        if timed or not _has_bound(bandit):
            continue
        bound = bound_of(comparison, bandit)
        if bound.constant > 0:
            order = BOUNDS[settings_of(bandit.configuration).rule]
            name = f"{bound.constant:.2g} × {order} ({bandit.name})"
            line = {"color": MUTED, "width": 1.6, "dash": dash}
            _line(fig, name, pick, bound.constant * bound.curve, unit, line, "bounds")
    fig.add_hline(y=0, line={"color": MUTED, "width": 1})
    # The axis fits the bandits: far worse arms would flatten everything else.
    ends = [comparison.regret(b, timed).regret for b in bandits]
    high = max(float(max(curve.max() for curve in ends)), 1e-9)
    low = min(float(min(curve.min() for curve in ends)), 0.0)
    room = high - low
    fig.update_yaxes(
        title_text=f"regret ({unit}) against {best.name}",
        range=[low - 0.08 * room, high + 0.6 * room],
    )
    fig.update_xaxes(title_text="round", rangemode="tozero")
    return legend_beside(fig, groupclick="toggleitem")


def arm_shares(comparison: ArmComparison, windows: int = 40) -> go.Figure:
    """The share of each arm in a bandit's rounds over time, one panel a bandit."""
    bandits, arms = comparison.of("bandit"), comparison.of("arm")
    frame = comparison.shares()
    favourites = frame.loc[frame.groupby("bandit")["share"].idxmax()].set_index("bandit")
    favourite = dict(favourites["arm"].items())
    first = bandits[0].name
    fig = make_subplots(
        rows=len(bandits), cols=1, shared_xaxes=True, vertical_spacing=0.25 / max(len(bandits), 2),
        subplot_titles=[f"{bandit.name}: mostly {favourite[bandit.name]}" for bandit in bandits],
    )  # fmt: skip
    most = max(len(bandit.rounds) for bandit in bandits)
    base_figure(
        f"{first} chooses {favourite[first]} in {favourites['share'][first]:.0%} of its rounds, "
        "more than any other arm",
        "Share of each arm in the rounds, over stretches of equal length in the order of the "
        "rounds.",
        140 + 150 * len(bandits),
        fig,
    )
    for row, bandit in enumerate(bandits, start=1):
        chosen = np.array([r.arm for r in bandit.rounds if r.arm is not None])
        parts = np.array_split(np.arange(len(chosen)), min(windows, len(chosen)))
        x = [float(part.mean()) + 1 for part in parts]
        for number, (arm, colour) in enumerate(zip(arms, cycle(ARM_COLOURS), strict=False)):
            fig.add_scatter(
                x=x, y=[float(np.mean(chosen[part] == number)) for part in parts],
                name=arm.name, legendgroup=arm.name, showlegend=row == 1, stackgroup=str(row),
                mode="lines", line={"width": 0.5, "color": colour}, fillcolor=colour,
                hovertemplate=f"<b>{arm.name}</b> in %{{y:.0%}} around round %{{x:.0f}}"
                f"<extra>{bandit.name}</extra>",
                row=row, col=1,
            )  # fmt: skip
        fig.update_yaxes(range=[0, 1], tickformat=".0%", row=row, col=1)
    fig.update_xaxes(range=[0, most])
    fig.update_xaxes(title_text="round", row=len(bandits), col=1)
    fig.update_layout(legend={"y": 1.0 + 60 / (140 + 150 * len(bandits))}, margin_t=110)
    return fig


def regret_table(comparison: ArmComparison) -> pd.DataFrame:
    """The table below the figure of regrets: each bandit's regret, the paper's order at its last
    round with the constant 1, and the constant that the curve needs."""
    rows = []
    for bandit in comparison.of("bandit"):
        settings = settings_of(bandit.configuration)
        bound = bound_of(comparison, bandit) if _has_bound(bandit) else None
        rows.append(
            {
                "bandit": bandit.name,
                "rounds": len(bandit.rounds),
                "regret (rounds)": comparison.regret(bandit).total,
                "regret (s)": comparison.regret(bandit, timed=True).total,
                "for each prompt (rounds)": comparison.regret_each(bandit).total,
                "for each prompt (s)": comparison.regret_each(bandit, timed=True).total,
                "bound": BOUNDS[settings.rule] if bound else "–",
                "at the end": float(bound.curve[-1]) if bound else float("nan"),
                "needed constant": bound.constant if bound else float("nan"),
            }
        )
    return pd.DataFrame(rows)


def _counts_tokens(bandit: BanditEntrant) -> bool:
    return settings_of(bandit.configuration).reward == "tokens"


def _has_bound(bandit: BanditEntrant) -> bool:
    """Whether one of the paper's theorems is about it."""
    return _counts_tokens(bandit) and settings_of(bandit.configuration).rule in BOUNDS


def _explained(comparison: ArmComparison) -> str:
    means = comparison.means
    return (
        "Grey: the order of the paper's bound with the least constant that holds; the theorems "
        f"leave theirs out. Here K = {len(means)}, L = {comparison.longest} and the hardness "
        f"H = {hardness(means):.2f}."
    )


def _line(
    fig: go.Figure, name: str, pick: np.ndarray, y: np.ndarray, unit: str, line: dict, group: str
) -> None:
    fig.add_scatter(
        x=pick + 1, y=y[pick], mode="lines", name=name, line=line, legendgroup=group,
        hovertemplate=f"<b>{name}</b><br>%{{y:.3~f}} {unit} at round %{{x}}<extra></extra>",
    )  # fmt: skip


def _signed(value: float, timed: bool) -> str:
    return f"{value:+.2f} s" if timed else f"{value:+.0f} rounds"
