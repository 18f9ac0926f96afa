"""How a head is trained, and how the training goes."""

from __future__ import annotations

from pydantic import Field

from specdec_core.config import Value
from specdec_core.training.eagle.acceptance import Acceptance


class EagleTrainingSettings(Value):
    """A training: AdamW, its rate warmed up and then falling to zero along a cosine.

    It ends after `epochs` passes over the texts or, with `minutes`, after so many of work.
    """

    draft_vocab_size: int = Field(default=8192, ge=2)
    steps: int = Field(default=5, ge=1, description="of the training-time test")
    share: float = Field(
        default=0.8, gt=0, le=1, description="weight of a step over the one before"
    )
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup: float = Field(default=0.03, ge=0, lt=1, description="share of the training")
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, gt=0, description="the gradient's norm")
    batch_tokens: int = Field(default=512, ge=1, description="of answers")
    epochs: int = Field(default=3, ge=1)
    minutes: float | None = Field(default=None, gt=0)
    evaluations: int = Field(default=12, ge=1, description="over the training")
    patience: int = Field(default=4, ge=1, description="evaluations without a better one")
    evaluation_texts: int = Field(default=128, ge=1, description="the most of those held out")
    seed: int = 0


class Evaluation(Value):
    """A head on texts held out."""

    share: float  # of the training that was done
    tokens: int  # of answers trained on so far
    loss: float  # of training, since the evaluation before
    acceptance: Acceptance


class Progress(Value):
    """How far a training is."""

    share: float
    loss: float  # running mean, in nats a chain
    tokens: int  # of answers so far
    seconds: float  # of work so far
    evaluation: Evaluation | None = None  # where one was due
