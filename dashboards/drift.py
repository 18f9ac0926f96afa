"""What lossy drafting changes: tables for the console and Markdown, and its MLflow run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table

from dashboards.tracking import as_metrics, as_params, connect, experiment_id_of, user_name
from specdec_core.base.environment import environment

_TOY = {
    "draft": "draft",
    "width": "width",
    "lossless": "keeps it",
    "kl": "KL, nats",
    "total_variation": "total variation",
    "sampled_kl": "KL by samples",
    "p_value": "p of none",
}
_TEXTS = {
    "draft": "draft",
    "width": "width",
    "lossless": "keeps it",
    "log_likelihood": "nats a token",
    "change": "against the target's own",
    "mat": "MAT",
}


def toy_table(toy: pd.DataFrame) -> Table:
    """Divergences on the toy pair by draft and width (columns as in `drift.csv`'s part)."""
    return _table("distance from the target's distribution, toy pair", _TOY, toy)


def texts_table(texts: pd.DataFrame, title: str) -> Table:
    """What the target thinks of the texts by draft and width."""
    return _table(title, _TEXTS, texts)


def markdown(toy: pd.DataFrame, texts: pd.DataFrame, notes: Sequence[str]) -> str:
    """Both tables below `notes`."""
    lines = ["# Drift of target-initialised trees", "", *(f"- {note}" for note in notes), ""]
    parts = (
        ("Distance from the target's distribution, toy pair", _TOY, toy),
        ("Log-likelihood of the output under the target", _TEXTS, texts),
    )
    for heading, columns, frame in parts:
        if len(frame):
            rows = [" | ".join(cells) for cells in _rows(frame, columns)]
            head = [" | ".join(columns.values()), " | ".join("---" for _ in columns)]
            lines += [f"## {heading}", "", *(f"| {row} |" for row in (*head, *rows)), ""]
    return "\n".join(lines).rstrip() + "\n"


def log_drift(
    experiment: str,
    params: Mapping[str, Any],
    toy: pd.DataFrame,
    texts: pd.DataFrame,
    files: Sequence[Path],
) -> str:
    """An MLflow run in the pair's experiment with every figure as a metric; returns its id."""
    client = connect()
    tags = {
        "mlflow.user": user_name(),
        "mlflow.source.name": "specdec drift",
        "lossless": "false",
        **environment(),
    }
    run = client.create_run(experiment_id_of(client, experiment), run_name="drift", tags=tags)
    run_id = run.info.run_id
    metrics = {}
    for part, frame, names in (
        ("toy", toy, ("kl", "total_variation", "sampled_kl", "p_value")),
        ("text", texts, ("log_likelihood", "change", "mat")),
    ):
        for row in frame.to_dict("records"):
            for name in names:
                if not pd.isna(row[name]):
                    place = f"{row['draft']}.width_{row['width']}" if row["width"] else row["draft"]
                    metrics[f"{part}.{place}.{name}"] = row[name]
    client.log_batch(run_id, metrics=as_metrics(metrics), params=as_params(params))
    for file in files:
        client.log_artifact(run_id, str(file))
    client.set_terminated(run_id)
    return run_id


def _table(title: str, columns: Mapping[str, str], frame: pd.DataFrame) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, collapse_padding=True
    )
    for name, heading in columns.items():
        words = name in ("draft", "lossless")
        table.add_column(heading, justify="left" if words else "right", no_wrap=True)
    for cells, row in zip(_rows(frame, columns), frame.to_dict("records"), strict=True):
        table.add_row(*cells, style="yellow" if not row["lossless"] else None)
    return table


def _rows(frame: pd.DataFrame, columns: Mapping[str, str]) -> Iterator[list[str]]:
    for row in frame.to_dict("records"):
        yield [_cell(name, row) for name in columns]


def _cell(name: str, row: Mapping[str, Any]) -> str:
    value = row[name]
    if name == "lossless":
        return "yes" if value else "lossy"
    if name == "width":
        return str(value or "–")
    if pd.isna(value):
        return "–"
    sign = "+" if name == "change" else ""
    if name == "log_likelihood":
        return f"{value:.3f}"
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    if low is not None:
        return f"{value:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"
    formats = {"mat": "{:.2f}", "p_value": "{:.1g}", "kl": "{:z.4f}", "total_variation": "{:z.4f}"}
    return formats.get(name, "{}").format(value)
