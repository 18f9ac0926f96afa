"""Bandits against each of their arms alone."""

from __future__ import annotations

import math

import pandas as pd

from dashboards import cells
from dashboards.reports.sentences import sentences
from dashboards.sections import Report, ReportOrigin, Section, metric_name
from research.bandits.comparison import ArmComparison
from research.bandits.figures import regret_svg, regret_table
from research.bandits.regret import hardness
from specdec_core.tokens.statistics import Ratio

COLUMNS = {
    "method": cells.text("name"),
    "MAT": cells.number("mat", ".2f"),
    "tokens/s": cells.number("tokens_per_second", ".1f"),
    "speedup": cells.number("speedup", ".2f×"),
    "over the best arm": cells.ratio("over_best", "low", "high"),
    "regret (rounds)": cells.number("regret_rounds", "+.0f"),
    "regret (s)": cells.number("regret_seconds", "+.2f"),
    "for each prompt (rounds)": cells.number("each_rounds", "+.0f"),
    "for each prompt (s)": cells.number("each_seconds", "+.2f"),
}
BRIEF = list(COLUMNS)[:6]  # as 80 columns allow


def report(comparison: ArmComparison, origin: ReportOrigin) -> Report:
    """Every bandit and every arm, the shares of the arms, and the regret over time."""
    table, shares = comparison.table(), comparison.shares()
    lines = [headline(table)]
    if differing := int(table["differing"].sum()):
        lines.append(f"{differing} outputs differ from autoregressive decoding's (near-ties)")
    return Report(
        command="bandits",
        title="Bandits and their arms",
        origin=origin,
        findings=lines,
        parts=[
            _methods(table),
            _shares(shares),
            _regret(comparison),
            Section(
                key="regret_seconds",
                title="Regret in seconds",
                note="Times are modelled." if comparison.modelled else "",
                svg=regret_svg(comparison, timed=True),
                on_console=False,
            ),
            sentences((entrant.name, entrant.configuration) for entrant in comparison.entrants),
        ],
        metrics=_metrics(table, shares),
        tags={"counted": "replay" if comparison.modelled else "live"},
    )


def headline(table: pd.DataFrame) -> str:
    """How the fastest bandit compares with the best single arm."""
    bandits, arms = (table[table["kind"] == kind] for kind in ("bandit", "arm"))
    best, arm = (rows.iloc[rows["tokens_per_second"].argmax()] for rows in (bandits, arms))
    ratio = Ratio(best["over_best"], best["low"], best["high"])
    verdict = "tied with" if ratio.tied else "faster than" if ratio.low > 1 else "slower than"
    return (
        f"{best['name']} is {verdict} the best single arm, {arm['name']}: "
        f"{cells.of_ratio(ratio)} its tokens a second"
    )


def _methods(table: pd.DataFrame) -> Section:
    return Section(
        key="table",
        title="Each bandit, each of its arms alone",
        note="Regret is what was spent beyond the best arm in hindsight, by rounds and by seconds:"
        " beyond the one that is best over all prompts, and beyond the best *for each prompt*,"
        " the paper's i*(pt, ν).",
        frame=table,
        shown=cells.table(table, COLUMNS),
        brief=BRIEF,
        intervals=False,
        marked=[int(table["tokens_per_second"].argmax())],
        ruled=cells.group_ends(table["kind"]),
    )


def _regret(comparison: ArmComparison) -> Section:
    frame, means = regret_table(comparison), comparison.means
    return Section(
        key="regret",
        title="Regret in rounds",
        note=f"Against {comparison.best().name}, the best arm in hindsight; below 0 a bandit is"
        " better than any single arm. Grey: the order of the paper's bound with the least constant"
        f" that holds; the theorems leave theirs out. Here K = {len(means)},"
        f" L = {comparison.longest} and the hardness H = {hardness(means):.2f}.",
        svg=regret_svg(comparison),
        frame=frame,
        shown=cells.everything(frame),
        on_console=False,
    )


def _shares(shares: pd.DataFrame) -> Section:
    wide = shares.pivot(index="bandit", columns="arm", values="share")
    wide = wide.loc[shares["bandit"].unique(), shares["arm"].unique()].reset_index()
    arms = {arm: cells.number(arm, ".0%") for arm in wide.columns[1:]}
    return Section(
        key="shares",
        title="Share of each arm",
        note="Of a bandit's rounds.",
        frame=shares,
        shown=cells.table(wide, {"bandit": cells.text("bandit"), **arms}),
        on_console=False,
    )


def _metrics(table: pd.DataFrame, shares: pd.DataFrame) -> dict[str, float]:
    metrics = {
        metric_name(row["name"], str(key)): value
        for row in table.to_dict("records")
        for key, value in row.items()
        if isinstance(value, float) and not math.isnan(value)
    }
    return metrics | {
        metric_name(row["bandit"], "share", row["arm"]): row["share"]
        for row in shares.to_dict("records")
    }
