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
        """Tokens a round, with a chain of as many candidates as it has steps; and of a chain from
        any token, the target's own included."""
        values: dict[str, float] = {}
        for kind, (_, length, tokens) in evaluation.acceptance.kinds.items():
            if tokens is not None:
                values[f"tokens a round, {kind}"] = tokens
            values[f"from any token, {kind}"] = 1 + length
        return values
