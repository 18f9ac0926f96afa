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
        """Acceptance by position, from 1, the expected accepted tokens, and those of a round."""
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
