"""What bandits lose against the best arm in hindsight, drawn over their rounds."""

from __future__ import annotations

from itertools import cycle
from typing import NamedTuple

import numpy as np

from dashboards.look import ARM_COLOURS, MUTED, evenly
from research.bandits.comparison import ArmComparison, BanditEntrant, settings_of
from research.bandits.regret import exp3_bound, ucb_bound
from research.frames import Rows, framed
from research.svg import DASHES, SvgLine, lines_svg

MOST_POINTS = 600
BOUNDS = {"ucb": "H L² log E[len]", "exp3": "L √(ST K log K)"}


class Bound(NamedTuple):
    """The order of a rule's regret (BanditSpec's theorems, without their constants, which are not
    printed) at each of its rounds, and the least constant with which it stays above the regret."""

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


def regret_svg(comparison: ArmComparison, timed: bool = False) -> str:
    """Cumulative regret of each bandit against the best arm in hindsight over the rounds: in rounds
    (stopping-time regret) or in seconds."""
    unit = "seconds" if timed else "rounds"
    return lines_svg(
        f"Regret in {unit}",
        f"{unit} beyond those that {comparison.best(timed).name} alone takes for the same tokens",
        regret_lines(comparison, timed),
        ("round", f"regret ({unit})"),
    )


def regret_lines(comparison: ArmComparison, timed: bool = False) -> list[SvgLine]:
    """A line for each bandit. In rounds, only bandits that are rewarded in tokens are drawn, if
    there are any. Each comes with the paper's bound, its order times the least constant that keeps
    it above the curve."""
    bandits = comparison.of("bandit")
    if not timed:
        bandits = [bandit for bandit in bandits if _counts_tokens(bandit)] or bandits
    lines = []
    for bandit, colour, dash in zip(bandits, cycle(ARM_COLOURS), cycle(DASHES), strict=False):
        loss = comparison.regret(bandit, timed).regret
        pick = evenly(len(loss), MOST_POINTS)
        rounds = (pick + 1).tolist()
        lines.append(SvgLine(bandit.name, colour, rounds, loss[pick].tolist(), dash))
        if timed or not _has_bound(bandit):
            continue
        bound = bound_of(comparison, bandit)
        if bound.constant > 0:
            order = BOUNDS[settings_of(bandit.configuration).rule]
            name = f"{bound.constant:.2g} × {order} ({bandit.name})"
            curve = (bound.constant * bound.curve[pick]).tolist()
            lines.append(SvgLine(name, MUTED, rounds, curve, dash))
    return lines


@framed
def regret_table(comparison: ArmComparison) -> Rows:
    """The table below the figure of regrets: the paper's order at each bandit's last round with the
    constant 1, and the constant that the curve needs."""
    for bandit in comparison.of("bandit"):
        settings = settings_of(bandit.configuration)
        bound = bound_of(comparison, bandit) if _has_bound(bandit) else None
        yield {
            "bandit": bandit.name,
            "rounds": len(bandit.rounds),
            "bound": BOUNDS[settings.rule] if bound else "–",
            "at the end": float(bound.curve[-1]) if bound else float("nan"),
            "needed constant": bound.constant if bound else float("nan"),
        }


def _counts_tokens(bandit: BanditEntrant) -> bool:
    return settings_of(bandit.configuration).reward == "tokens"


def _has_bound(bandit: BanditEntrant) -> bool:
    """Whether one of the paper's theorems is about it."""
    return _counts_tokens(bandit) and settings_of(bandit.configuration).rule in BOUNDS
