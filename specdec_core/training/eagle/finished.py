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

    @property
    def limit(self) -> float:
        return 1 + self.settings.steps

    def learned(self, evaluation: EagleEvaluation) -> dict[str, float]:
        """Tokens a forward of the target, with a chain of as many candidates as it has steps."""
        found = evaluation.acceptance
        lengths = {
            "tokens a forward, greedy": found.greedy_length if found.greedy else None,
            "temperature 1": found.sampled_length if found.sampled else None,
        }
        return {name: 1 + length for name, length in lengths.items() if length is not None}
