"""How a head is trained, and how the training goes."""

from __future__ import annotations

from pydantic import Field

from specdec_core.config import Value
from specdec_core.training.eagle.acceptance import Acceptance
from specdec_core.training.recorded.settings import Evaluation, TrainingSettings


class _Unrolled(Value):
    draft_vocab_size: int = Field(default=8192, ge=2)
    steps: int = Field(default=5, ge=1, description="of the training-time test")
    share: float = Field(
        default=0.8, gt=0, le=1, description="weight of a step over the one before"
    )


# Fields of the last base come first. Their order is part of a training's digest.
class EagleTrainingSettings(TrainingSettings, _Unrolled):
    """The training of an EAGLE head."""


class EagleEvaluation(Evaluation):
    """A head on texts held out."""

    acceptance: Acceptance

    @property
    def score(self) -> float:
        return self.acceptance.length

    @property
    def figures(self) -> dict[str, float]:
        """Acceptance by position, from 1, and the expected accepted tokens."""
        found = self.acceptance
        kinds = {
            "greedy": (found.greedy, found.greedy_length),
            "sampled": (found.sampled, found.sampled_length),
        }
        values: dict[str, float] = {}
        for kind, (positions, length) in kinds.items():
            if positions:
                values[f"accepted_{kind}"] = length
                values |= {f"acceptance_{kind}_{n}": a for n, a in enumerate(positions, start=1)}
        return values

    @property
    def summary(self) -> str:
        return f"{1 + self.score:.3f} tokens a target forward"
