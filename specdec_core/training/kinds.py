"""The kinds of models that are trained on recorded answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec_core.training.eagle.settings import EagleTrainingSettings
from specdec_core.training.eagle.training import EagleTraining, EagleTrainingCard
from specdec_core.training.recorded.finished import TrainingCard
from specdec_core.training.recorded.settings import TrainingSettings
from specdec_core.training.recorded.training import RecordedTraining
from specdec_core.training.reduced_draft.settings import DraftTrainingSettings
from specdec_core.training.reduced_draft.training import DraftTraining, DraftTrainingCard


@dataclass(frozen=True)
class TrainedKind:
    """A kind of model: the command that trains it, and what its training is made of.

    `name` is also that of the folder that the model is put into, `title` that of its run;
    `workspace` is the folder of the workspace that all of the kind are in. Evaluations are of the
    answers at the temperatures `judged_at`, of all answers where there are none.
    """

    name: str
    command: str
    title: str
    workspace: str
    settings: type[TrainingSettings]
    training: type[RecordedTraining[Any, Any, Any]]
    card: type[TrainingCard]
    judged_at: tuple[float, ...] = ()


HEAD = TrainedKind(
    name="head",
    command="train eagle",
    title="EAGLE head",
    workspace="eagle",
    settings=EagleTrainingSettings,
    training=EagleTraining,
    card=EagleTrainingCard,
    judged_at=(0.0, 1.0),
)
DRAFT = TrainedKind(
    name="draft",
    command="train draft",
    title="draft",
    workspace="drafts",
    settings=DraftTrainingSettings,
    training=DraftTraining,
    card=DraftTrainingCard,
)
KINDS = {kind.name: kind for kind in (HEAD, DRAFT)}
