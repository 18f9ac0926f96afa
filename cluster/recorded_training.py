"""A model trained on recorded answers with each of several learning rates, in parallel. The model
with the best evaluation is kept.

Each training has its own folder, with a checkpoint: the same call, repeated, resumes it. The nodes
of a cluster read the features and write the models in folders that all nodes see.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import torch

from cluster.parallel import in_parallel
from specdec_core.base.files import atomic_folder, needs_room
from specdec_core.base.observer import together
from specdec_core.training.finished import Finished
from specdec_core.training.recorded.features import RecordedTexts
from specdec_core.training.recorded.finished import (
    TrainingCard,
    TrainingObserver,
    finished_in,
    training_digest,
)
from specdec_core.training.recorded.settings import Progress, TrainingSettings
from specdec_core.training.recorded.training import RecordedTraining

_TRAINING = ".training"
_UNSEEN = "its model is not in the folder; a folder that all nodes see is needed"


AnyTraining = type[RecordedTraining[Any, Any, Any]]


def train_recorded(
    kind: AnyTraining, features: Path, settings: TrainingSettings, folder: Path, threads: int
) -> Iterator[Progress]:
    """Train one model, from its last checkpoint if it has one, and save it in `folder`."""
    torch.set_num_threads(threads)
    training = kind(RecordedTexts(features), settings)
    reports: SimpleQueue[Progress | None] = SimpleQueue()
    stopped = Event()

    def report(progress: Progress) -> None:
        if stopped.is_set():
            raise InterruptedError("the training was stopped")
        reports.put(progress)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(training.run, folder / "checkpoints", report)
        done.add_done_callback(lambda _: reports.put(None))
        try:
            while (progress := reports.get()) is not None:
                yield progress
        finally:
            stopped.set()
        done.result()
    training.save(folder / kind.name)


def train(
    kind: AnyTraining,
    features: Path,
    settings: TrainingSettings,
    learning_rates: Sequence[float],
    out: Path,
    threads: int = 1,
    observers: Sequence[TrainingObserver] = (),
) -> tuple[Finished[Any], list[Finished[Any]]]:
    """Train a model on the features in a folder, with each of the learning rates, and put the best
    into `out`. Returns that one, and the models of all learning rates.

    Raises:
        UserError: too few texts, or more threads than a node has.
        RuntimeError: no model could be trained.
    """
    texts = RecordedTexts(features)
    texts.split(kind.judged_at)
    observer = together(TrainingObserver, observers)
    trainings: dict[str, tuple[Path, TrainingSettings, str]] = {}
    for learning_rate in learning_rates:
        own = settings.model_copy(update={"learning_rate": learning_rate})
        digest = training_digest(texts, own)
        label = f"lr{learning_rate:g}"
        trainings[label] = ((out / _TRAINING / f"{label}-{digest[:10]}").absolute(), own, digest)

    def finished() -> dict[str, Finished[TrainingCard]]:
        found = {
            label: finished_in(folder / kind.name, label, digest, kind.card_type)
            for label, (folder, _, digest) in trainings.items()
        }
        return {label: model for label, model in found.items() if model is not None}

    models = finished()
    observer.stage("training", 100 * len(trainings), done=100 * len(models))
    calls = {
        label: (kind, features.absolute(), own, folder, threads)
        for label, (folder, own, _) in trainings.items()
        if label not in models
    }
    failures: dict[str, str] = {}
    for label, progress in in_parallel(train_recorded, calls, threads, "cpu", failures.__setitem__):
        observer.advanced(label, progress)
    models = finished()
    for label in calls:
        if label not in models:
            observer.warned(f"{label} failed: {failures.get(label, _UNSEEN)}")
    if not models:
        raise RuntimeError(f"no {kind.title} could be trained: {failures}")
    best = max(models.values(), key=lambda model: model.card.best.score)
    with needs_room(out):
        out.mkdir(parents=True, exist_ok=True)
        with atomic_folder(out / kind.name) as new:
            shutil.copytree(best.folder, new, dirs_exist_ok=True)
    return Finished(best.label, out / kind.name, best.card), [*models.values()]
