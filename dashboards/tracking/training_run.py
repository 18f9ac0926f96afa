"""The runs of trainings: of acceptance heads, and of models on recorded answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, RunTag

from dashboards.outputs.mlflow_runs import log_figures
from dashboards.reports.heads import reliability
from dashboards.store import as_metrics, as_params, run_tags
from dashboards.tracking.delivered_run import DeliveredRun
from specdec_core.base.environment import environment
from specdec_core.config import PairSpec
from specdec_core.drafting.heads.card import HeadCard
from specdec_core.drafting.heads.storage import CARD
from specdec_core.training.heads.evaluation import Modelled
from specdec_core.training.heads.finished import FinishedHead, HeadObserver
from specdec_core.training.kinds import TrainedKind
from specdec_core.training.recorded.finished import Finished, TrainingCard, TrainingObserver
from specdec_core.training.recorded.settings import Progress

CARD_PARAMS = {"kind", "draft", "depth", "width", "w_acc", "w_rej", "settings", "sampling"}


class PlannedRun(DeliveredRun):
    """A parent run for a training in the pair's experiment, with a nested run for each model. With
    the same parameters the same run is continued, and no model is logged twice."""

    key = "training"

    def __init__(
        self,
        pair: PairSpec,
        params: Mapping[str, Any],
        name: str,
        command: str,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """`params` say what is trained on what; `name` and `tags` are the run's."""
        super().__init__()
        self.tags = run_tags(command, environment())
        plan = json.dumps([tags or {}, params], sort_keys=True)
        self.plan = hashlib.sha256(plan.encode()).hexdigest()
        identity = ("training_plan", self.plan)
        self._start(pair.name, identity, name, {**(tags or {}), **self.tags}, params)

    def _log_finished(self, run_id: str, folder: Path, name: str) -> None:
        """Log a model's folder and end its run."""
        self._client.log_artifacts(run_id, str(folder), name)
        self._client.set_terminated(run_id)


class HeadsRun(PlannedRun, HeadObserver):
    """The run of a training of acceptance heads."""

    def __init__(self, pair: PairSpec, draft: str, params: Mapping[str, Any]) -> None:
        self.cards: dict[str, HeadCard] = {}
        self.judged: dict[str, Modelled] = {}  # by head, with its best threshold on a recording
        name = f"heads of {draft}"
        super().__init__(pair, params, name, "train head", {"draft": draft})

    def head_finished(self, head: FinishedHead) -> None:
        """Log a head as a finished nested run."""
        self.cards[head.label] = head.card
        self._put(partial(self._log, head))

    def finish(self, out: Path) -> None:
        """Log the figures and end the run. Raises :class:`Undelivered` where the store cannot be
        reached; the heads are in `out`."""
        self._put(self._finish)
        self._deliver(f"the heads are in {out}")
        self.finished = True

    def _finish(self) -> None:
        if self.cards:
            section = reliability(self.cards, judged=self.judged)
            log_figures(self._client, self.run_id, [section])
        self._client.set_terminated(self.run_id)

    def _log(self, head: FinishedHead) -> None:
        """Log a head's settings, its curves by epoch, the metrics of the epoch kept, its figure and
        its folder."""
        run = self._nested_run(head.card.training, head.label, self.tags)
        if run.info.status == "FINISHED":
            return
        run_id, card = run.info.run_id, head.card
        trained = int((head.folder / CARD).stat().st_mtime * 1000)  # the same if logged twice
        curve = [
            Metric(key, float(value), trained, epoch.epoch)
            for epoch in card.curve
            for key, value in epoch.model_dump(exclude={"epoch"}).items()
        ]
        kept = {f"kept_{key}": value for key, value in card.metrics.items()}
        rows = {f"{split}_rows": count for split, count in card.examples.items()}
        self._client.log_batch(
            run_id,
            metrics=[*curve, *as_metrics({**kept, **rows})],
            params=as_params(card.model_dump(mode="json", include=CARD_PARAMS)),
            tags=[RunTag(f"fingerprint.{name}", value) for name, value in card.pair.items()],
        )
        log_figures(self._client, run_id, [reliability({head.label: card})])
        self._log_finished(run_id, head.folder, "head")


class TrainingRun(PlannedRun, TrainingObserver):
    """The run of a training on recorded answers, with a nested run for each learning rate. Its
    curves grow during the training; resumed, it is continued."""

    def __init__(self, kind: TrainedKind, pair: PairSpec, params: Mapping[str, Any]) -> None:
        self.kind = kind
        self.runs: dict[str, str] = {}  # ids of nested runs, by label
        super().__init__(pair, params, kind.title, kind.command)

    def advanced(self, label: str, progress: Progress) -> None:
        """Log a model's loss and speed, and its evaluation where there is one."""
        self._put(partial(self._log_progress, label, progress))

    def model_finished(self, model: Finished[TrainingCard]) -> None:
        """Log a model's folder and end its nested run."""
        self._put(partial(self._log_model, model))

    def finish(self, best: Finished[TrainingCard]) -> None:
        """Log the model that was chosen and end the run. Raises :class:`Undelivered` where the
        store cannot be reached."""
        self._put(lambda: self._log_best(self.run_id, best, {"best": best.label}))
        self._deliver(f"the {self.kind.name} is in {best.folder}")
        self.finished = True

    def _run_of(self, label: str) -> str:
        if label not in self.runs:
            run = self._nested_run(f"{self.plan[:16]}-{label}", label, self.tags)
            self.runs[label] = run.info.run_id
        return self.runs[label]

    def _log_progress(self, label: str, progress: Progress) -> None:
        values = {"loss": progress.loss, "tokens_per_second": progress.speed}
        values |= progress.figures
        metrics = as_metrics({key: {progress.tokens: value} for key, value in values.items()})
        self._client.log_batch(self._run_of(label), metrics=metrics)

    def _log_model(self, model: Finished[TrainingCard]) -> None:
        run_id = self._run_of(model.label)
        if self._client.get_run(run_id).info.status != "FINISHED":
            self._log_best(run_id, model, model.card.settings.model_dump(mode="json"))

    def _log_best(
        self, run_id: str, model: Finished[TrainingCard], params: Mapping[str, Any]
    ) -> None:
        """Log the metrics of the weights that were kept, `params` and the folder; end the run."""
        kept = {f"kept_{key}": value for key, value in model.card.best.figures.items()}
        metrics = as_metrics({**kept, "coverage": model.card.coverage})
        self._client.log_batch(run_id, metrics=metrics, params=as_params(params))
        self._log_finished(run_id, model.folder, self.kind.name)
