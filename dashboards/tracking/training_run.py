"""Trainings as runs of MLflow, logged when they have ended: of acceptance heads, and of models on
recorded answers. A training with the same parameters replaces its earlier run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dashboards.outputs.mlflow_runs import delivering, forget, log_run
from dashboards.sections import LoggedRun
from dashboards.store import connect, experiment_id_of, run_tags, runs_where
from specdec_core.base.environment import environment
from specdec_core.config import PairSpec
from specdec_core.training.heads.training import FinishedHead
from specdec_core.training.recorded.finished import TrainingCard
from specdec_core.training.recorded.training import RecordedTraining

CARD_PARAMS = {"kind", "draft", "depth", "width", "w_acc", "w_rej", "settings", "sampling"}
PLAN = "training_plan"  # tag: the parameters of the training


def log_heads(
    pair: PairSpec,
    draft: str,
    params: Mapping[str, Any],
    heads: Sequence[FinishedHead],
    out: Path,
) -> str:
    """Log the heads of a draft, which are in `out`; returns the run's id. `params` say what was
    trained on what. Raises :class:`Undelivered`."""
    run = LoggedRun(
        name=f"heads of {draft}",
        params=params,
        tags={"draft": draft},
        nested=[_head_run(head) for head in heads],
    )
    return _log(pair, run, "train head", f"the heads are in {out}")


def _head_run(head: FinishedHead) -> LoggedRun:
    """A head's settings, its curves by epoch, and the metrics of the epoch that was kept."""
    card = head.card
    curves: dict[str, dict[int, float]] = {}
    for epoch in card.curve:
        for key, value in epoch.model_dump(exclude={"epoch"}).items():
            curves.setdefault(key, {})[epoch.epoch] = value
    kept = {f"kept_{key}": value for key, value in card.metrics.items()}
    rows = {f"{split}_rows": count for split, count in card.examples.items()}
    return LoggedRun(
        name=head.label,
        params=card.model_dump(mode="json", include=CARD_PARAMS),
        metrics={**curves, **kept, **rows},
        tags={
            "training": card.training,
            **{f"fingerprint.{name}": value for name, value in card.pair.items()},
        },
        files=[(head.folder, "head")],
    )


def log_training(
    kind: type[RecordedTraining[Any, Any, Any]],
    pair: PairSpec,
    params: Mapping[str, Any],
    card: TrainingCard,
    folder: Path,
) -> str:
    """Log a training on recorded answers, with the model in `folder`: its settings, its curves by
    tokens, and the evaluation of the weights that were kept; returns the run's id. Raises
    :class:`Undelivered`."""
    curves: dict[str, dict[int, float]] = {}
    for evaluation in card.curve:
        for key, value in {"loss": evaluation.loss, **evaluation.figures}.items():
            curves.setdefault(key, {})[evaluation.tokens] = value
    kept = {f"kept_{key}": value for key, value in card.best.figures.items()}
    speed = card.tokens / card.seconds if card.seconds else 0.0
    run = LoggedRun(
        name=kind.title,
        params={**params, "settings": card.settings.model_dump(mode="json")},
        metrics={**curves, **kept, "coverage": card.coverage, "tokens_per_second": speed},
        tags={"training": card.training},
        files=[(folder, kind.name)],
    )
    return _log(pair, run, kind.command, f"the {kind.name} is in {folder}")


def _log(pair: PairSpec, run: LoggedRun, command: str, results: str) -> str:
    """Log a training and its models in the pair's experiment, in place of an earlier run of the
    same training; `results` says where they are. Raises :class:`Undelivered`."""
    tags = run_tags(command, environment())
    known = json.dumps([run.name, run.tags.get("draft"), run.params], sort_keys=True)
    plan = hashlib.sha256(known.encode()).hexdigest()
    nested: Sequence[LoggedRun] = [replace(each, tags={**each.tags, **tags}) for each in run.nested]
    run = replace(run, tags={**run.tags, **tags, PLAN: plan}, nested=nested)
    with delivering(f"{results}, and the same command logs them"):
        client = connect()
        experiment_id = experiment_id_of(client, pair.name)
        for earlier in list(runs_where(client, experiment_id, f"tags.{PLAN} = '{plan}'")):
            forget(client, earlier)
        return log_run(client, experiment_id, run)
