"""The comparison of planned trees: tables for the console and Markdown, the page of figures, and
its MLflow run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from plotly.offline import get_plotlyjs
from rich import box
from rich.table import Table

from dashboards import figures, look
from dashboards.drawings import Drawing, embed, log_figures, template
from dashboards.tracking import as_metrics, as_params, connect, experiment_id_of, user_name
from specdec_core.base.environment import environment
from specdec_core.studies.trees import GRID, KINDS, PLANNED, TreeComparison

_HEADINGS = {
    "budget": "nodes\nat most",
    "kind": "tree",
    "shape": "shape",
    "nodes": "nodes",
    "expected": "planned\nfor",
    "mat": "MAT",
    "speedup": "speedup",
    "over_grid": "over the\ngrid's best",
}
RANKS = 8  # shown in the console


def acceptance_table(comparisons: Sequence[TreeComparison]) -> Table:
    """How often the target's token has each rank in the draft's distribution."""
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("rank of the target's token")
    ranks = min(RANKS, *(len(own.acceptance) for own in comparisons))
    for rank in range(1, ranks + 1):
        table.add_column(f"{rank}", justify="right")
    for own in comparisons:
        table.add_row(own.draft, *(f"{rate:.1%}" for rate in own.acceptance[:ranks]))
    return table


def budgets_table(comparison: TreeComparison) -> Table:
    """The best trees by budget, the fastest of all bold."""
    table = Table(
        title=comparison.draft, title_justify="left", box=box.SIMPLE, pad_edge=False,
        collapse_padding=True,
    )  # fmt: skip
    for name, heading in _HEADINGS.items():
        words = name in ("kind", "shape")
        table.add_column(heading, justify="left" if words else "right", no_wrap=not words)
    fastest = comparison.budgets["speedup"].max()
    rows = list(_rows(comparison))
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(
            *_cells(row),
            style="bold" if row["speedup"] == fastest else None,
            end_section=following is None or following["budget"] != row["budget"],
        )
    return table


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


def frame(comparisons: Sequence[TreeComparison]) -> pd.DataFrame:
    """One row a draft, budget and kind."""
    parts = [own.budgets.assign(draft=own.draft) for own in comparisons]
    found = pd.concat(parts, ignore_index=True)
    return found[["draft", *(name for name in found.columns if name != "draft")]]


def grids(comparisons: Sequence[TreeComparison]) -> pd.DataFrame:
    """One row a draft and k-configuration."""
    return pd.concat([own.grid.assign(draft=own.draft) for own in comparisons], ignore_index=True)


def markdown(comparisons: Sequence[TreeComparison], notes: Sequence[str]) -> str:
    lines = ["# Static trees, planned and tried", "", *(f"- {note}" for note in notes)]
    headings = [heading.replace("\n", " ") for heading in _HEADINGS.values()]
    for own in comparisons:
        lines += ["", f"## {own.draft}", "", headline(own), ""]
        lines += [f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
        lines += [f"| {' | '.join(_cells(row))} |" for row in _rows(own)]
    return "\n".join(lines) + "\n"


def drawings(comparisons: Sequence[TreeComparison]) -> dict[str, Drawing]:
    """The figures by name."""
    drawn = {"trees": Drawing(figures.tree_heatmap(grids(comparisons)))}
    for own in comparisons:
        drawn[f"budgets-{own.draft}"] = Drawing(figures.trees_by_budget(own))
        drawn[f"ranks-{own.draft}"] = Drawing(figures.acceptance_by_rank(own))
    return drawn


def page(
    drawn: Mapping[str, Drawing],
    comparisons: Sequence[TreeComparison],
    name: str,
    notes: Sequence[str],
) -> str:
    """Figures and tables as one HTML page that needs no network."""
    return template("trees.jinja").render(
        name=name,
        notes=[*notes, *map(headline, comparisons)],
        headings=[heading.replace("\n", " ") for heading in _HEADINGS.values()],
        tables=[(own.draft, list(map(_cells, _rows(own)))) for own in comparisons],
        figures=[embed(key, drawing) for key, drawing in drawn.items()],
        neutral=[look.INK, look.MUTED, look.PAPER],
        plotly=get_plotlyjs(),
    )


def log_trees(
    experiment: str,
    name: str,
    params: Mapping[str, Any],
    comparisons: Sequence[TreeComparison],
    drawn: Mapping[str, Drawing],
    files: Sequence[Path],
) -> str:
    """An MLflow run of a comparison in the pair's experiment; returns its id."""
    client = connect()
    tags = {
        "mlflow.user": user_name(),
        "mlflow.source.name": "specdec plan-tree",
        "counted": "replay",
        **environment(),
    }
    run = client.create_run(experiment_id_of(client, experiment), run_name=name, tags=tags)
    run_id = run.info.run_id
    metrics = {}
    for own in comparisons:
        kinds = {"grid": own.best(GRID), "planned": own.best(PLANNED), "proposed": own.proposed}
        for kind, row in kinds.items():
            for quantity in ("nodes", "depth", "expected", "mat", "speedup"):
                metrics[f"{own.draft}.{kind}.{quantity}"] = float(row[quantity])
        for rank, rate in enumerate(own.acceptance[:RANKS], start=1):
            metrics[f"{own.draft}.acceptance.rank_{rank}"] = float(rate)
    client.log_batch(run_id, metrics=as_metrics(metrics), params=as_params(params))
    log_figures(client, run_id, drawn)
    for file in files:
        client.log_artifact(run_id, str(file))
    client.set_terminated(run_id)
    return run_id


def _rows(comparison: TreeComparison) -> Iterator[dict[str, Any]]:
    """One row a budget and shape, with the kinds that have it as their best; those that all had
    for a smaller budget already are not repeated."""
    shown: set[tuple[str, Any]] = set()
    for budget, rows in comparison.budgets.groupby("budget"):
        tried = rows.set_index("kind").loc[GRID, "speedup"]
        for _, same in rows.groupby(rows["branching"].map(str), sort=False):
            row = same.iloc[0].to_dict()
            kinds = [(kind, row["branching"]) for kind in same["kind"]]
            if shown.issuperset(kinds):
                continue
            shown.update(kinds)
            kind = "all" if len(same) == len(KINDS) else " = ".join(same["kind"])
            yield {**row, "budget": budget, "kind": kind, "over_grid": row["speedup"] / tried - 1}


def _cells(row: Mapping[str, Any]) -> list[str]:
    formats = {"expected": "{:.2f}", "mat": "{:.2f}", "speedup": "{:.3f}×", "over_grid": "{:+.1%}"}
    return [formats.get(name, "{}").format(row[name]) for name in _HEADINGS]
