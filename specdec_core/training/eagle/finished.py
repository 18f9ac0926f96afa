"""The card of a trained EAGLE head."""

from __future__ import annotations

from specdec_core.models.eagle import EagleSettings
from specdec_core.training.eagle.settings import EagleEvaluation, EagleTrainingSettings
from specdec_core.training.recorded.finished import TrainingCard


class EagleTrainingCard(TrainingCard):
    """How a head was trained."""

    settings: EagleTrainingSettings
    head: EagleSettings
    best: EagleEvaluation
    curve: tuple[EagleEvaluation, ...]
