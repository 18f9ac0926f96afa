"""The settings of a head's training, and its evaluations."""

from __future__ import annotations

from pydantic import Field

from specdec_core.training.eagle.acceptance import Acceptance
from specdec_core.training.recorded.settings import Evaluation, TrainingSettings


class EagleTrainingSettings(TrainingSettings):
    """The training of an EAGLE head."""

    steps: int = Field(default=5, ge=1, description="of the training-time test")
    share: float = Field(
        default=0.8, gt=0, le=1, description="weight of a step over the one before"
    )


class EagleEvaluation(Evaluation):
    """A head on held-out answers."""

    acceptance: Acceptance

    @property
    def score(self) -> float:
        """The tokens of a round where they were counted, else of a chain from any token; greedy,
        or at temperature 1 where no text is greedy."""
        _, length, tokens = next(iter(self.acceptance.kinds.values()))
        return 1 + length if tokens is None else tokens

    @property
    def figures(self) -> dict[str, float]:
        """Acceptance by position, from 1, the expected accepted tokens, and the tokens of a
        round."""
        values: dict[str, float] = {}
        for name, (positions, length, tokens) in self.acceptance.kinds.items():
            kind = "greedy" if name == "greedy" else "sampled"
            values[f"accepted_{kind}"] = length
            values |= {f"acceptance_{kind}_{n}": a for n, a in enumerate(positions, start=1)}
            if tokens is not None:
                values[f"tokens_{kind}"] = tokens
        return values

    @property
    def summary(self) -> str:
        _, length, tokens = next(iter(self.acceptance.kinds.values()))
        from_any = f"{1 + length:.3f} tokens from any token"
        return from_any if tokens is None else f"{tokens:.3f} tokens a round, {from_any}"
