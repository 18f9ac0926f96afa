"""A model trained on recorded answers with each of several learning rates: Ray Tune trials, of
which the one with the best evaluation is kept.

A trial has its own folder, with its checkpoint: the same call, repeated, goes on from there. Nodes
of a cluster read the recorded features, and write, in folders that all of them see.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ray import tune

from cluster.session import resources
from cluster.training_trials import TrialRecord, run_trials
from specdec_core.base.files import atomic_folder, needs_room
from specdec_core.base.observer import together
from specdec_core.training.kinds import KINDS, TrainedKind
from specdec_core.training.recorded.features import RecordedTexts
from specdec_core.training.recorded.finished import (
    Finished,
    TrainingCard,
    TrainingObserver,
    finished_in,
    load_card,
    trained_after,
    training_digest,
)
from specdec_core.training.recorded.settings import Progress, TrainingSettings
from specdec_core.training.recorded.training import CHECKPOINT, checkpoint_of

_SECONDS = 20.0  # of work between two reports, which is what an interruption may cost
_TRAINING = ".training"


class RecordedTrial(tune.Trainable):
    """Trains one model, some seconds a step, as `config["trial"]` says."""

    def setup(self, config: dict[str, Any]) -> None:
        config = config["trial"]
        torch.set_num_threads(config["threads"])
        self.kind, self.folder = KINDS[config["kind"]], Path(config["folder"])
        settings = self.kind.settings.model_validate_json(config["settings"])
        texts = RecordedTexts(Path(config["features"]))
        make: Any = self.kind.training
        self.training = make(texts, settings, self.folder / CHECKPOINT)

    def step(self) -> dict[str, Any]:
        if not self.training.done:
            progress = self.training.advance(_SECONDS)
        else:  # interrupted between its last step and its end
            progress = self.training.progress
        if self.training.done:
            self.training.save(self.folder / self.kind.name)
        return {"progress": progress.model_dump_json(), "done": self.training.done}


def train(
    kind: TrainedKind,
    features: Path,
    settings: TrainingSettings,
    learning_rates: Sequence[float],
    out: Path,
    threads: int = 1,
    observers: Sequence[TrainingObserver] = (),
    further: bool = False,
) -> Finished[Any]:
    """Train a model on the features in a folder, with each of the learning rates, and put the best
    into `out`. `further` begins with the best weights of the model that `out` holds.

    Raises:
        UserError: too few texts, more threads than a node has, or nothing to go on from.
        RuntimeError: no model could be trained.
    """
    texts = RecordedTexts(features)
    texts.split(kind.judged_at)
    if further:
        earlier = load_card(out / kind.name, kind.card)
        settings = trained_after(earlier, texts, settings, out / kind.name)
        checkpoint_of(out / _TRAINING, earlier.training)
    observer = together(TrainingObserver, observers)
    trials: dict[str, tuple[Path, TrainingSettings, str]] = {}
    for learning_rate in learning_rates:
        own = settings.model_copy(update={"learning_rate": learning_rate})
        digest = training_digest(texts, own)
        label = f"lr{learning_rate:g}"
        trials[label] = (out / _TRAINING / f"{label}-{digest[:10]}", own, digest)

    def finished() -> dict[str, Finished[TrainingCard]]:
        found = {
            label: finished_in(folder / kind.name, label, digest, kind.card)
            for label, (folder, _, digest) in trials.items()
        }
        return {label: model for label, model in found.items() if model is not None}

    already = finished()
    observer.stage("training", 100 * len(trials), done=100 * len(already))
    for model in already.values():
        observer.model_finished(model)
    if pending := [label for label in trials if label not in already]:
        record = _RecordedTrials(kind, observer)
        configs = [
            {
                "label": label,
                "kind": kind.name,
                "folder": str(trials[label][0].absolute()),
                "settings": trials[label][1].model_dump_json(),
                "features": str(features.absolute()),
                "threads": threads,
            }
            for label in pending
        ]
        run_trials(RecordedTrial, resources(threads, "cpu"), configs, record)
        models = finished()
        for label in pending:
            if label in models:
                observer.model_finished(models[label])
            else:
                observer.warned(f"{label} failed: {record.why(label)}")
        if not models:
            raise RuntimeError(f"no {kind.title} could be trained: {record.errors}")
    best = max(finished().values(), key=lambda model: model.card.best.score)
    with needs_room(out):
        out.mkdir(parents=True, exist_ok=True)
        with atomic_folder(out / kind.name) as new:
            shutil.copytree(best.folder, new, dirs_exist_ok=True)
    return Finished(best.label, out / kind.name, best.card)


class _RecordedTrials(TrialRecord):
    """Passes the progress of trials on."""

    key = "trial"

    def __init__(self, kind: TrainedKind, observer: TrainingObserver) -> None:
        super().__init__()
        self.kind, self.observer = kind, observer

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        self.observer.advanced(self.label(trial), self._read(result.pop("progress")))

    def _read(self, progress: str) -> Progress:
        values = json.loads(progress)
        if values["evaluation"] is not None:
            evaluation = self.kind.training.evaluation_type
            values["evaluation"] = evaluation.model_validate(values["evaluation"])
        return Progress.model_validate(values)
