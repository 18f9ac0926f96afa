"""Planned trees, and every k-configuration tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from dashboards import cells
from dashboards.look import OTHER_COLOURS, style
from dashboards.reports.sentences import sentences
from dashboards.sections import Report, ReportOrigin, Section
from research.plan_tree.comparison import CHAIN, GRID, KINDS, PLANNED, TreeComparison
from research.svg import SvgLine, lines_svg

COLUMNS = {
    "nodes at most": cells.text("budget"),
    "tree": cells.text("kind"),
    "shape": cells.text("shape"),
    "nodes": cells.text("nodes"),
    "planned for": cells.number("expected", ".2f"),
    "MAT": cells.number("mat", ".2f"),
    "speedup": cells.number("speedup", ".3f×"),
    "over the grid's best": cells.number("over_grid", "+.1%"),
}
RANKS = 8  # shown
LOOKS = {  # of the kinds of trees: colour, dash, what the legend says
    CHAIN: (style("fixed").colour, "2 3", "best chain"),
    GRID: (OTHER_COLOURS[0], "", "best of all k-configurations"),
    PLANNED: (OTHER_COLOURS[1], "", "planned tree"),
}


def report(comparisons: Sequence[TreeComparison], origin: ReportOrigin) -> Report:
    """A comparison a draft: what is proposed, the best by budget, and figures."""
    return Report(
        command="plan-tree",
        title="Static trees, planned and tried",
        origin=origin,
        findings=[*map(headline, comparisons)],
        parts=[
            _acceptance(comparisons),
            *map(_budgets, comparisons),
            sentences((c.configuration.label, c.configuration) for c in comparisons),
        ],
        frames={
            "budgets": pd.concat([each.budgets for each in comparisons], ignore_index=True),
            "grid": pd.concat([each.grid for each in comparisons], ignore_index=True),
        },
        run_name=f"trees {origin.name}",
        metrics={key: value for each in comparisons for key, value in _metrics(each)},
        tags={"counted": "replay"},
    )


def headline(comparison: TreeComparison) -> str:
    """What the planner proposes, and how it compares with trying everything."""
    proposed, tried = comparison.proposed, comparison.best(GRID)
    return (
        f"{comparison.draft}: {proposed['shape']}, {proposed['nodes']} nodes, MAT "
        f"{proposed['mat']:.2f}, ≈ {proposed['speedup']:.3f}×; "
        f"{proposed['speedup'] / tried['speedup'] - 1:+.1%} over the best of "
        f"{len(comparison.grid):,} k-configurations, {tried['shape']} "
        f"(≈ {tried['speedup']:.3f}×)"
    )


def _acceptance(comparisons: Sequence[TreeComparison]) -> Section:
    ranks = min(RANKS, *(len(each.acceptance) for each in comparisons))
    rows = [{"draft": each.draft, **dict(enumerate(each.acceptance))} for each in comparisons]
    rates = {str(rank + 1): cells.number(rank, ".1%") for rank in range(ranks)}
    return Section(
        key="acceptance",
        title="How drafts rank the target's token",
        note="Share of the recorded places at which it has this rank in the draft's distribution.",
        shown=cells.table(rows, {"rank of the target's token": cells.text("draft"), **rates}),
    )


def _budgets(comparison: TreeComparison) -> Section:
    rows, budgets = list(_rows(comparison)), comparison.budgets
    fastest = max(row["speedup"] for row in rows)
    return Section(
        key=f"budgets-{comparison.draft}",
        title=f"The best trees by budget, {comparison.draft}",
        note="Planned trees were chosen by acceptance rates alone, the grid's best and the best"
        " chain by replaying all of them.",
        svg=lines_svg(
            f"The best trees by budget, {comparison.draft}",
            "modelled speedup over autoregressive decoding",
            [
                SvgLine.of(
                    name, colour, budgets[budgets["kind"] == kind], "budget", "speedup", dash
                )
                for kind, (colour, dash, name) in LOOKS.items()
            ],
            ("nodes at most", "speedup"),
            zero=False,
        ),
        shown=cells.table(rows, COLUMNS),
        marked=[n for n, row in enumerate(rows) if row["speedup"] == fastest],
        ruled=cells.group_ends(row["budget"] for row in rows),
    )


def _rows(comparison: TreeComparison) -> Iterator[dict[str, Any]]:
    """One row a budget and shape, with the kinds of tree that are best with it; not repeated where
    all these kinds had it for a smaller budget already."""
    shown: set[tuple[str, Any]] = set()
    for budget, rows in comparison.budgets.groupby("budget"):
        tried = rows.set_index("kind").loc[GRID, "speedup"]
        for _, same in rows.groupby(rows["branching"].map(str), sort=False):
            row = {str(name): value for name, value in same.iloc[0].items()}
            kinds = [(kind, row["branching"]) for kind in same["kind"]]
            if shown.issuperset(kinds):
                continue
            shown.update(kinds)
            kind = "all" if len(same) == len(KINDS) else " = ".join(same["kind"])
            yield {**row, "budget": budget, "kind": kind, "over_grid": row["speedup"] / tried - 1}


def _metrics(comparison: TreeComparison) -> Iterator[tuple[str, float]]:
    kinds: dict[str, cells.Row] = {
        "grid": comparison.best(GRID),
        "planned": comparison.best(PLANNED),
        "proposed": comparison.proposed,
    }
    for kind, row in kinds.items():
        for quantity in ("nodes", "depth", "expected", "mat", "speedup"):
            yield f"{comparison.draft}.{kind}.{quantity}", float(row[quantity])
    for rank, rate in enumerate(comparison.acceptance[:RANKS], start=1):
        yield f"{comparison.draft}.acceptance.rank_{rank}", float(rate)
