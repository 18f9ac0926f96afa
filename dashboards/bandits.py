"""Bandits against their arms: the table for console and Markdown, the page of figures, and the
MLflow run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from plotly.offline import get_plotlyjs
from rich import box
from rich.table import Table

from dashboards import look
from dashboards.drawings import Drawing, embed, log_figures, template
from dashboards.figures.regret import arm_shares, regret_curves, regret_table
from dashboards.tracking import as_metrics, as_params, connect, experiment_id_of, user_name
from specdec_core.base.environment import environment
from specdec_core.studies.bandits import ArmComparison

_SHOWN = {
    "name": "method",
    "mat": "MAT",
    "tokens_per_second": "tokens/s",
    "speedup": "speedup",
    "over_best": "over the\nbest arm",
    "interval": "95 %\ninterval",
    "regret_rounds": "regret\n(rounds)",
    "regret_seconds": "regret\n(s)",
}

# A console has 80 columns.
_NARROW = [name for name in _SHOWN if name not in ("interval", "regret_seconds")]


def bandits_table(table: pd.DataFrame) -> Table:
    """What :meth:`ArmComparison.table` has, the fastest row bold."""
    shown = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for name in _NARROW:
        numeric = name != "name"
        shown.add_column(_SHOWN[name], justify="right" if numeric else "left", no_wrap=numeric)
    fastest = table["tokens_per_second"].max()
    rows = table.to_dict("records")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        shown.add_row(
            *_cells(row, _NARROW),
            style="bold" if row["tokens_per_second"] == fastest else None,
            end_section=following is None or following["kind"] != row["kind"],
        )
    return shown


def headline(table: pd.DataFrame) -> str:
    """How the fastest bandit compares with the best single arm."""
    bandits = table[table["kind"] == "bandit"]
    arms = table[table["kind"] == "arm"]
    best = bandits.loc[bandits["tokens_per_second"].idxmax()]
    arm = arms.loc[arms["tokens_per_second"].idxmax()]
    tied = best["low"] <= 1 <= best["high"]
    verdict = "tied with" if tied else "faster than" if best["low"] > 1 else "slower than"
    return (
        f"{best['name']} is {verdict} the best single arm, {arm['name']}: "
        f"{best['over_best']:.2f}× its tokens a second ({best['low']:.2f} … {best['high']:.2f})"
    )


def markdown(table: pd.DataFrame, shares: pd.DataFrame, notes: Sequence[str]) -> str:
    """The table, and the arms' shares, below `notes`."""
    headings = [heading.replace("\n", " ") for heading in _SHOWN.values()]
    lines = ["# Bandits and their arms", "", *(f"- {note}" for note in notes), ""]
    lines += _pipe(headings, [_cells(row) for row in table.to_dict("records")])
    wide = shares.pivot(index="bandit", columns="arm", values="share")
    wide = wide.loc[shares["bandit"].unique(), shares["arm"].unique()]
    rows = [[name, *(f"{share:.0%}" for share in row)] for name, *row in wide.itertuples()]
    lines += ["", "## Share of each arm", "", *_pipe(["bandit", *wide.columns], rows)]
    return "\n".join(lines) + "\n"


def drawings(comparison: ArmComparison) -> dict[str, Drawing]:
    """The figures by name."""
    return {
        "regret": Drawing(regret_curves(comparison), regret_table(comparison)),
        "regret_seconds": Drawing(regret_curves(comparison, timed=True)),
        "arms": Drawing(arm_shares(comparison)),
    }


def page(
    comparison: ArmComparison,
    drawn: Mapping[str, Drawing],
    name: str,
    pair: str,
    notes: Sequence[str],
) -> str:
    """Table and figures as one HTML page that needs no network."""
    table = comparison.table()
    return template("bandits.jinja").render(
        title=headline(table),
        name=name,
        pair=pair,
        notes=notes,
        headings=[heading.replace("\n", " ") for heading in _SHOWN.values()],
        rows=[_cells(row) for row in table.to_dict("records")],
        figures=[embed(key, drawing) for key, drawing in drawn.items()],
        neutral=[look.INK, look.MUTED, look.PAPER],
        plotly=get_plotlyjs(),
    )


def log_bandits(
    experiment: str,
    name: str,
    params: Mapping[str, Any],
    comparison: ArmComparison,
    drawn: Mapping[str, Drawing],
    files: Sequence[Path],
) -> str:
    """An MLflow run of a comparison in the pair's experiment; returns its id."""
    client = connect()
    tags = {
        "mlflow.user": user_name(),
        "mlflow.source.name": "specdec bandits",
        "counted": "replay" if comparison.modelled else "live",
        **environment(),
    }
    run_id = client.create_run(
        experiment_id_of(client, experiment), run_name=name, tags=tags
    ).info.run_id
    metrics = {}
    for row in comparison.table().to_dict("records"):
        for key, value in row.items():
            if isinstance(value, float) and not math.isnan(value):
                metrics[f"{_key(row['name'])}.{key}"] = value
    for row in comparison.shares().to_dict("records"):
        metrics[f"{_key(row['bandit'])}.share.{_key(row['arm'])}"] = row["share"]
    client.log_batch(run_id, metrics=as_metrics(metrics), params=as_params(params))
    log_figures(client, run_id, drawn)
    for file in files:
        client.log_artifact(run_id, str(file))
    client.set_terminated(run_id)
    return run_id


def _cells(row: Mapping[str, Any], names: Iterable[str] = _SHOWN) -> list[str]:
    formats = {
        "name": "{}",
        "mat": "{:.2f}",
        "tokens_per_second": "{:.1f}",
        "speedup": "{:.2f}×",
        "over_best": "{:.2f}×",
        "regret_rounds": "{:+.0f}",
        "regret_seconds": "{:+.2f}",
    }
    cells = []
    for name in names:
        if name == "interval":
            apart = row["low"] != row["high"]
            cells.append(f"{row['low']:.2f} … {row['high']:.2f}" if apart else "–")
        elif isinstance(row[name], float) and math.isnan(row[name]):
            cells.append("–")
        else:
            cells.append(formats[name].format(row[name]))
    return cells


def _pipe(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = "|" + " --- |" * len(headings)
    lines = [f"| {' | '.join(cells)} |" for cells in (headings, *rows)]
    return [lines[0], rule, *lines[1:]]


def _key(text: str) -> str:
    """A metric's name: MLflow allows letters, digits and _ - . / in it."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "_" for c in text)
