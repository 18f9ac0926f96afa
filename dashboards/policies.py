"""The comparison of length policies: tables for the console and Markdown, and its MLflow run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table

from dashboards.tracking import as_metrics, as_params, connect, experiment_id_of, user_name
from specdec_core.base.environment import environment
from specdec_core.studies.policies import ADAPTIVE, FIXED

_SHOWN = {
    "family": "family",
    "configuration": "best configuration",
    "tried": "of",
    "latency_ms": "ms a\ntoken",
    "speedup": "speedup",
    "over_fixed": "over best\nfixed K",
    "of_oracle": "of the\noracle's",
    "discard_rate": "discard\nrate",
    "verification_rate": "verific.\nrate",
    "mat": "MAT",
}

# A label says its family, and a console has 80 columns.
_NARROW = [name for name in _SHOWN if name not in ("family", "tried")]

_MOVED = ("draft", "family", "chosen_on", "used_on", "configuration")


def families_table(best: pd.DataFrame, recording: str, draft: str) -> Table:
    """The best of each family on a recording with a draft (see
    :func:`specdec_core.studies.policies.best_of_families`), the fastest that is no oracle bold."""
    table = _table(f"{recording} · {draft or 'no draft model'}")
    for name in _NARROW:
        numeric = name != "configuration"
        table.add_column(_SHOWN[name], justify="right" if numeric else "left", no_wrap=numeric)
    rows = _part(best, recording, draft)
    fastest = rows.loc[rows["family"] != "oracle", "speedup"].max()
    for row in rows.to_dict("records"):
        bold = row["family"] != "oracle" and row["speedup"] == fastest
        table.add_row(*_cells(row, _NARROW), style="bold" if bold else None)
    return table


def transfer_table(transfers: pd.DataFrame, draft: str) -> Table:
    """How much slower a choice is elsewhere than the choice made there: a row for each family and
    recording that it was chosen on, a column for each that it is used on."""
    rows = transfers[transfers["draft"] == draft]
    names = list(rows["used_on"].unique())
    table = _table(f"chosen on one set, used on another · {draft or 'no draft model'}")
    for heading in ("family", "chosen on", "configuration"):
        table.add_column(heading)
    for name in names:
        table.add_column(f"loss on\n{name}", justify="right", no_wrap=True)
    for (family, chosen), own in rows.groupby(["family", "chosen_on"], sort=False):
        loss = own.set_index("used_on")["loss"]
        cells = ["–" if name == chosen else f"{loss[name]:.2%}" for name in names]
        style = "bold" if family == ADAPTIVE else None
        table.add_row(family, chosen, own["configuration"].iloc[0], *cells, style=style)
    return table


def markdown(best: pd.DataFrame, transfers: pd.DataFrame, notes: Sequence[str]) -> str:
    """Both tables of every recording and draft as Markdown, below `notes`."""
    lines = ["# Length policies compared by replay", "", *(f"- {note}" for note in notes), ""]
    headings = [heading.replace("\n", " ") for heading in _SHOWN.values()]
    for recording, draft in _parts(best):
        rows = [_cells(row) for row in _part(best, recording, draft).to_dict("records")]
        lines += [f"## {recording}, {draft or 'no draft model'}", "", *_pipe(headings, rows), ""]
    if len(transfers) and transfers["chosen_on"].nunique() > 1:
        lines += ["## Chosen on one set, used on another", ""]
        rows = [
            [*(r[c] for c in _MOVED), f"{r['loss']:.2%}"]
            for r in transfers.to_dict("records")
            if r["chosen_on"] != r["used_on"]
        ]
        lines += _pipe([*(c.replace("_", " ") for c in _MOVED), "loss"], rows)
    return "\n".join(lines).rstrip() + "\n"


def log_policies(
    experiment: str,
    name: str,
    params: Mapping[str, Any],
    best: pd.DataFrame,
    transfers: pd.DataFrame,
    files: Sequence[Path],
) -> str:
    """An MLflow run of a comparison in the pair's experiment: the best of each family as metrics,
    everything else as `files`. Returns the run's id."""
    client = connect()
    tags = {
        "mlflow.user": user_name(),
        "mlflow.source.name": "specdec policies",
        "counted": "replay",
        **environment(),
    }
    run = client.create_run(experiment_id_of(client, experiment), run_name=name, tags=tags)
    run_id = run.info.run_id
    metrics = {}
    for row in best.to_dict("records"):
        key = _key(row["recording"], row["draft"] or "none", row["family"])
        for quantity in ("latency_ms", "speedup", "over_fixed", "of_oracle"):
            if not math.isnan(row[quantity]):
                metrics[f"{key}.{quantity}"] = row[quantity]
    for row in transfers.to_dict("records"):
        if row["chosen_on"] != row["used_on"]:
            parts = (row["chosen_on"], row["used_on"], row["draft"] or "none", row["family"])
            metrics[f"transfer.{_key(*parts)}.loss"] = row["loss"]
    client.log_batch(run_id, metrics=as_metrics(metrics), params=as_params(params))
    for file in files:
        client.log_artifact(run_id, str(file))
    client.set_terminated(run_id)
    return run_id


def headline(best: pd.DataFrame) -> list[str]:
    """For each recording, how the best that adapts compares with the best fixed K."""
    lines = []
    for recording, draft in _parts(best):
        rows = _part(best, recording, draft)
        adaptive = rows[~rows["family"].isin([FIXED, "oracle", "prompt_lookup", "autoregressive"])]
        if not draft or adaptive.empty:
            continue
        top = adaptive.iloc[0]
        line = f"{recording}, {draft}: {top['configuration']}, {top['speedup']:.3f}×"
        if not math.isnan(top["over_fixed"]):
            line += f", {top['over_fixed']:+.1%} over the best fixed K"
        if not math.isnan(top["of_oracle"]):
            line += f", {top['of_oracle']:.1%} of the oracle's speedup"
        lines.append(line)
    return lines


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, collapse_padding=True
    )


def _parts(best: pd.DataFrame) -> list[tuple[str, str]]:
    """Recordings and drafts, as they come."""
    pairs = best[["recording", "draft"]].drop_duplicates()
    return [(row.recording, row.draft) for row in pairs.itertuples()]


def _part(best: pd.DataFrame, recording: str, draft: str) -> pd.DataFrame:
    return best[(best["recording"] == recording) & (best["draft"] == draft)]


def _cells(row: Mapping[str, Any], names: Iterable[str] = _SHOWN) -> list[str]:
    return [_cell(name, row[name]) for name in names]


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float) and math.isnan(value):
        return "–"
    formats = {
        "over_fixed": "{:+.1%}",
        "of_oracle": "{:.1%}",
        "speedup": "{:.3f}×",
        "mat": "{:.2f}",
        "tried": "{}",
        "family": "{}",
        "configuration": "{}",
    }
    return formats.get(name, "{:.3f}").format(value)


def _pipe(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = "|" + " --- |" * len(headings)
    return (
        [f"| {' | '.join(cells)} |" for cells in (headings,)]
        + [rule]
        + [f"| {' | '.join(cells)} |" for cells in rows]
    )


def _key(*parts: str) -> str:
    """A metric's name: MLflow allows letters, digits and _ - . / in it."""
    allowed = lambda c: c if c.isalnum() or c in "_-" else "_"  # noqa: E731
    return ".".join("".join(map(allowed, part)) for part in parts)
