"""What trainings on recorded answers have in common: how they go, and how far they are."""

from __future__ import annotations

from pydantic import Field, SerializeAsAny

from specdec_core.config import Value


class TrainingSettings(Value):
    """A training: AdamW, its rate warmed up and then falling to zero along a cosine.

    It ends after `epochs` passes over the texts or, with `minutes`, after so many of work.
    """

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
    after: str | None = Field(
        default=None,
        exclude_if=lambda digest: digest is None,
        description="the digest of a training beside it, whose best weights it begins with",
    )

    @property
    def order_seed(self) -> int:
        """Of the texts' order: another than that of the training before, so that its first texts
        are not read most often."""
        return self.seed if self.after is None else self.seed ^ int(self.after[:8], 16)


class Evaluation(Value):
    """A model on texts held out. A subclass has figures of its kind."""

    share: float  # of the training that was done
    tokens: int  # of answers trained on so far
    loss: float  # of training, since the evaluation before

    @property
    def score(self) -> float:
        """What the best evaluation has most of."""
        raise NotImplementedError

    @property
    def figures(self) -> dict[str, float]:
        """What was measured, by name."""
        raise NotImplementedError

    @property
    def summary(self) -> str:
        """The score in words, for a line of progress."""
        raise NotImplementedError


class Progress(Value):
    """How far a training is."""

    share: float
    loss: float  # running mean, in nats of what is predicted
    tokens: int  # of answers so far
    seconds: float  # of work so far
    evaluation: SerializeAsAny[Evaluation] | None = None  # where one was due

    @property
    def speed(self) -> float:
        """Tokens of answers a second of work."""
        return self.tokens / self.seconds if self.seconds else 0.0
