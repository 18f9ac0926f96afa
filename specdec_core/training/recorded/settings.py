"""Settings and evaluations of all trainings on recorded answers."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from specdec_core.config import Value
from specdec_core.training.recorded.loss import LossKind


class TrainingSettings(Value):
    """A training by Muon and AdamW (:class:`~specdec_core.training.optimiser.Optimiser`), with
    rates that are warmed up and then fall to zero along a cosine.

    It ends after `epochs` passes over the answers or, with `minutes`, after that time of training.
    """

    start: str | None = Field(
        default=None, description="the trained model that it begins with, and whose shape it keeps"
    )
    draft_vocab_size: int | None = Field(default=None, ge=2, description="unset, 8192 or start's")
    loss: LossKind = Field(
        default="cross_entropy", description="or acceptance, which gains at temperature 1"
    )
    learning_rate: float = Field(default=1e-3, gt=0, description="AdamW's")
    matrix_rate: float | None = Field(
        default=0.02, gt=0, description="Muon's, of the matrices of layers; null: AdamW for all"
    )
    warmup: float = Field(default=0.03, ge=0, lt=1, description="share of the training")
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, gt=0, description="the gradient's norm")
    batch_tokens: int = Field(default=1024, ge=1, description="of answers")
    epochs: int = Field(default=3, ge=1)
    minutes: float | None = Field(default=None, gt=0)
    evaluations: int = Field(default=12, ge=1, description="over the training")
    patience: int = Field(default=4, ge=1, description="evaluations without a better one")
    evaluation_texts: int = Field(default=128, ge=1, description="held-out answers at most")
    seed: int = 0

    @model_validator(mode="after")
    def _keeps_the_start(self) -> Self:
        changed = [name for name in self.of_the_shape if getattr(self, name)]
        if self.start and changed:
            raise ValueError(f"{', '.join(changed)}: {self.start} has its own")
        return self

    @property
    def of_the_shape(self) -> tuple[str, ...]:
        """The settings of the model's shape; unset, they are empty or None."""
        return ("draft_vocab_size",)


class Evaluation(Value):
    """A model on held-out answers. A subclass has figures of its kind."""

    share: float = 0.0  # of the training that was done
    tokens: int = 0  # of answers trained on so far
    loss: float = 0.0  # of training, since the report before

    @property
    def score(self) -> float:
        """What is maximised."""
        raise NotImplementedError

    @property
    def figures(self) -> dict[str, float]:
        """What was measured, by name."""
        raise NotImplementedError

    @property
    def summary(self) -> str:
        """The score in words, for a line of progress."""
        raise NotImplementedError
