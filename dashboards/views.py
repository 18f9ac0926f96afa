"""How MLflow's pages show our experiments: as tables of runs, the columns to compare first.

MLflow 3.17 opens an experiment on charts of traces, unless the address asks for its runs, and its
table of runs has no metrics, unless a saved view names them. Each experiment therefore has a saved
view for each kind of run, and a description that links to them from the top of every page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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


VIEWS = {
    "sweeps": View(
        "tags.family != ''",
        (
            "metrics.`speedup`",
            "metrics.`estimated_speedup`",
            "metrics.`tokens_per_second`",
            "metrics.`verification_rate`",
            "metrics.`discard_rate`",
            "metrics.`mat`",
            "tags.`lossless`",
        ),
    ),
    "benchmarks": View(
        "tags.group != ''",
        (
            "metrics.`over_autoregressive`",
            "metrics.`over_autoregressive_low`",
            "metrics.`over_autoregressive_high`",
            "metrics.`tokens_per_second`",
            "metrics.`mean_accepted`",
            "tags.`temperature`",
            "tags.`lossless`",
        ),
    ),
    "heads": View(
        "tags.training != ''",
        (
            "metrics.`kept_eval_kl`",
            "metrics.`kept_train_kl`",
            "metrics.`kept_auc`",
            "metrics.`kept_ece`",
            "params.`kind`",
            "params.`w_rej`",
            "params.`depth`",
        ),
        ascending=True,
    ),
}


def present(
    client: MlflowClient, experiment: Experiment, views: Mapping[str, View] = VIEWS
) -> None:
    """Set the tags that an experiment lacks. A tag that it has may be a user's choice."""
    pages = {view: runs_page(experiment.experiment_id, view) for view in views}
    pages["all runs"] = runs_page(experiment.experiment_id)
    links = ", ".join(f"[{title}]({page})" for title, page in pages.items())
    tags = {
        # for versions without a switch between GenAI and model training
        "mlflow.experimentKind": "custom_model_development",
        "mlflow.note.content": f"Compare {links}",
        **{f"mlflow.sharedViewState.{title}": view.saved(title) for title, view in views.items()},
    }
    for key, value in tags.items():
        if key not in experiment.tags:
            client.set_experiment_tag(experiment.experiment_id, key, value)


def runs_page(experiment_id: str, view: str | None = None) -> str:
    """Where a server shows an experiment's runs, relative to its address."""
    saved = f"&viewStateShareKey={view}" if view else ""
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning{saved}"
