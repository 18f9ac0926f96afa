"""The run of a training on recorded answers, logged while it goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from mlflow.entities import Metric

from dashboards.store import (
    as_metrics,
    as_params,
    connect,
    experiment_id_of,
    run_tags,
    runs_where,
)
from dashboards.tracking.delivered_run import DeliveredRun
from dashboards.tracking.delivery import Delivery
from specdec_core.base.environment import environment
from specdec_core.base.observer import Observer
from specdec_core.config import PairSpec
from specdec_core.training.kinds import TrainedKind
from specdec_core.training.recorded.finished import Finished, TrainingCard, TrainingObserver
from specdec_core.training.recorded.settings import Progress


class TrainingRun(DeliveredRun, TrainingObserver):
    """A parent run for a training in the pair's experiment, with a nested run for each learning
    rate. Its curves grow while it is trained; resumed, it is continued."""

    key = "training"

    def __init__(
        self,
        kind: TrainedKind,
        pair: PairSpec,
        params: Mapping[str, Any],
        observer: Observer | None = None,
    ) -> None:
        """`params` say what is trained on what; with the same ones, the same run is continued."""
        super().__init__(observer)
        self.kind = kind
        self.plan = hashlib.sha256(json.dumps(params, sort_keys=True).encode()).hexdigest()
        self.runs: dict[str, str] = {}  # ids of nested runs, by label
        self.client = connect(patient=True)
        self.delivery = Delivery()  # one thread: the run is begun before anything is logged to it
        self._put(partial(self._begin, pair.name, params))

    def advanced(self, label: str, progress: Progress) -> None:
        """Log a model's loss and speed, and its evaluation where there is one."""
        self._put(partial(self._log_progress, label, progress))

    def model_finished(self, model: Finished[TrainingCard]) -> None:
        """Log a model's folder and end its nested run."""
        self._put(partial(self._log_model, model))

    def finish(self, best: Finished[TrainingCard]) -> None:
        """Log the model that was chosen and end the run. Raises :class:`Undelivered` where the
        store cannot be reached."""
        self._put(partial(self._finish, best))
        self._deliver(f"the {self.kind.name} is in {best.folder}")
        self.finished = True

    def _begin(self, experiment: str, params: Mapping[str, Any]) -> None:
        self.experiment_id = experiment_id_of(self._client, experiment)
        query = f"tags.training_plan = '{self.plan}'"
        parent = next(runs_where(self._client, self.experiment_id, query), None)
        tags = {"training_plan": self.plan, **run_tags(self.kind.command, environment())}
        if self._take_up(parent, self.kind.title, tags):
            self._client.log_batch(self.run_id, params=as_params(params))

    def _run_of(self, label: str) -> str:
        if label not in self.runs:
            tags = run_tags(self.kind.command, environment())
            run = self._nested_run(f"{self.plan[:16]}-{label}", label, tags)
            self.runs[label] = run.info.run_id
        return self.runs[label]

    def _log_progress(self, label: str, progress: Progress) -> None:
        run_id = self._run_of(label)
        values = {"loss": progress.loss, "tokens_per_second": progress.speed}
        metrics = _at(progress.tokens, values)
        metrics += _at(progress.tokens, progress.figures)
        self._client.log_batch(run_id, metrics=metrics)

    def _log_model(self, model: Finished[TrainingCard]) -> None:
        run_id = self._run_of(model.label)
        if self._client.get_run(run_id).info.status == "FINISHED":
            return
        card = model.card
        self._client.log_batch(
            run_id,
            metrics=as_metrics(_best_metrics(model)),
            params=as_params(card.settings.model_dump(mode="json")),
        )
        self._client.log_artifacts(run_id, str(model.folder), self.kind.name)
        self._client.set_terminated(run_id)

    def _finish(self, best: Finished[TrainingCard]) -> None:
        self._client.log_batch(
            self.run_id,
            metrics=as_metrics(_best_metrics(best)),
            params=as_params({"best": best.label}),
        )
        self._client.log_artifacts(self.run_id, str(best.folder), self.kind.name)
        self._client.set_terminated(self.run_id)


def _best_metrics(model: Finished[TrainingCard]) -> dict[str, float]:
    kept = {f"kept_{key}": value for key, value in model.card.best.figures.items()}
    return {**kept, "coverage": model.card.coverage}


def _at(step: int, values: Mapping[str, float]) -> list[Metric]:
    return as_metrics({key: {step: value} for key, value in values.items()})
