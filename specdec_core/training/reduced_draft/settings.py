"""The shape of a draft, how it is trained, and how good it is."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from specdec_core.training.recorded.settings import Evaluation, TrainingSettings


class DraftTrainingSettings(TrainingSettings):
    """A Llama of this shape, and its training."""

    draft_vocab_size: int = Field(default=8192, ge=2)
    width: int = Field(default=384, ge=2)
    layers: int = Field(default=4, ge=1)
    inner: int = Field(default=1024, ge=1, description="width between the matrices of an MLP")
    heads: int = Field(default=6, ge=1, description="of attention")
    key_value_heads: int = Field(default=3, ge=1)
    embedding: Literal["target", "own"] = Field(
        default="target", description="a projection of the target's, or a table of its own"
    )
    form: Literal["plain", "int8"] = Field(default="int8", description="of the stored matrices")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} is no even multiple of {self.heads} heads")
        if self.heads % self.key_value_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.key_value_heads} keys")
        return self


class DraftEvaluation(Evaluation):
    """A draft on texts held out, a token ahead."""

    agreement: float  # share of places where its best token is the target's
    overlap: float  # mean Σ min(p, q): acceptance at temperature 1

    @property
    def score(self) -> float:
        return self.agreement

    @property
    def figures(self) -> dict[str, float]:
        return {"agreement": self.agreement, "overlap": self.overlap}

    @property
    def summary(self) -> str:
        return f"agreement {self.agreement:.3f}, overlap {self.overlap:.3f}"
