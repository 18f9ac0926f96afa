"""The runs of trained heads, logged while the training goes on."""

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
from specdec_core.drafting.heads.card import HeadCard
from specdec_core.drafting.heads.storage import CARD
from specdec_core.training.heads.evaluation import Modelled
from specdec_core.training.heads.finished import FinishedHead, HeadObserver

CARD_PARAMS = {"kind", "draft", "depth", "width", "w_acc", "w_rej", "settings", "sampling"}


class HeadsRun(DeliveredRun, HeadObserver):
    """A parent run for a training of heads in the pair's experiment, with a nested run for each
    head. A head is logged once, however often the training is repeated or resumed."""

    key = "training"

    def __init__(
        self,
        pair: PairSpec,
        draft: str,
        params: Mapping[str, Any],
        observer: Observer | None = None,
    ) -> None:
        """`params` say what is trained on what; with the same ones, the same run is continued."""
        super().__init__(observer)
        self.cards: dict[str, HeadCard] = {}
        self.judged: dict[str, Modelled] = {}  # by head, with its best threshold on a recording
        self.client = connect(patient=True)
        self.delivery = Delivery()  # one thread: the run is begun before anything is logged to it
        self._put(partial(self._begin, pair.name, draft, params))

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

    def _begin(self, experiment: str, draft: str, params: Mapping[str, Any]) -> None:
        self.experiment_id = experiment_id_of(self._client, experiment)
        plan = hashlib.sha256(json.dumps([draft, params], sort_keys=True).encode()).hexdigest()
        query = f"tags.training_plan = '{plan}'"
        parent = next(runs_where(self._client, self.experiment_id, query), None)
        tags = {"training_plan": plan, "draft": draft, **run_tags("train head", environment())}
        if self._take_up(parent, f"heads of {draft}", tags):
            self._client.log_batch(self.run_id, params=as_params(params))

    def _finish(self) -> None:
        if self.cards:
            section = reliability(self.cards, judged=self.judged)
            log_figures(self._client, self.run_id, [section])
        self._client.set_terminated(self.run_id)

    def _log(self, head: FinishedHead) -> None:
        tags = run_tags("train head", environment())
        run = self._nested_run(head.card.training, head.label, tags)
        if run.info.status == "FINISHED":
            return
        run_id = run.info.run_id
        self._log_card(run_id, head)
        # Its curves are the run's metrics, which MLflow draws itself.
        log_figures(self._client, run_id, [reliability({head.label: head.card})])
        self._client.log_artifacts(run_id, str(head.folder), "head")
        self._client.set_terminated(run_id)

    def _log_card(self, run_id: str, head: FinishedHead) -> None:
        """Log a head's settings, its curves by epoch, and the metrics of the epoch kept."""
        card = head.card
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
