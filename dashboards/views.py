"""How MLflow's pages show our experiments: as tables of runs, the columns to compare first.

MLflow 3.17 opens an experiment on charts of traces, unless the address asks for its runs, and its
table of runs has no metrics, unless a saved view names them. Each experiment therefore has a saved
view for each kind of run, and a description that links to them from the top of every page.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from mlflow import MlflowClient
from mlflow.entities import Experiment

NAME = "attributes.`Run Name`"


@dataclass(frozen=True)
class View:
    """Runs of one kind as a table."""

    runs: str  # which ones, as MLflow's search filter
    columns: tuple[str, ...]  # from the left, after the run's name; sorted by the first
    ascending: bool = False

    def saved(self, title: str) -> str:
        """The view as MLflow keeps it, in a tag of the experiment."""
        widths = {column: max(96, 7 * len(column)) for column in self.columns}  # pixels
        state = {
            "searchFilter": self.runs,
            "orderByKey": self.columns[0],
            "orderByAsc": self.ascending,
            "selectedColumns": self.columns,
            "columnOrder": [NAME, *self.columns],
            "columnWidths": {NAME: 280, **widths},
        }
        return json.dumps({"name": title, "createdAt": 0, "state": json.dumps(state)})


def _columns(kind: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{kind}.`{name}`" for name in names)


VIEWS = {
    "sweeps": View(
        "tags.family != ''",
        _columns("metrics", "speedup", "estimated_speedup", "tokens_per_second")
        + _columns("metrics", "verification_rate", "discard_rate", "mat")
        + _columns("tags", "lossless"),
    ),
    "benchmarks": View(
        "tags.group != ''",
        _columns("metrics", *(f"over_autoregressive{end}" for end in ("", "_low", "_high")))
        + _columns("metrics", "tokens_per_second", "mean_accepted")
        + _columns("tags", "temperature", "lossless"),
    ),
    "heads": View(
        "tags.training != ''",
        _columns("metrics", "kept_eval_kl", "kept_train_kl", "kept_auc", "kept_ece")
        + _columns("params", "kind", "w_rej", "depth"),
        ascending=True,
    ),
}


def present(client: MlflowClient, experiment: Experiment) -> None:
    """Set the tags that an experiment lacks. A tag that it has may be a user's choice."""
    pages = {view: runs_page(experiment.experiment_id, view) for view in VIEWS}
    pages["all runs"] = runs_page(experiment.experiment_id)
    links = ", ".join(f"[{title}]({page})" for title, page in pages.items())
    tags = {
        # for versions without a switch between GenAI and model training
        "mlflow.experimentKind": "custom_model_development",
        "mlflow.note.content": f"Compare {links}",
        **{f"mlflow.sharedViewState.{title}": view.saved(title) for title, view in VIEWS.items()},
    }
    for key, value in tags.items():
        if key not in experiment.tags:
            client.set_experiment_tag(experiment.experiment_id, key, value)


def runs_page(experiment_id: str, view: str | None = None) -> str:
    """Where a server shows an experiment's runs, relative to its address."""
    saved = f"&viewStateShareKey={view}" if view else ""
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning{saved}"
