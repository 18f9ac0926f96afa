"""The shape of a draft, how it is trained, and how good it is."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from specdec_core.training.recorded.settings import Evaluation, TrainingSettings

_SHAPE = {"width": 384, "layers": 4, "inner": 1024, "heads": 6, "key_value_heads": 3}


class DraftTrainingSettings(TrainingSettings):
    """A draft that begins as some of its target's layers, or a Llama of this shape that begins with
    random weights; and its training."""

    copied_layers: tuple[int, ...] = Field(
        default=(),
        description="of a Llama-like target. The embedding and the output layer are then the"
        " target's own, and are neither trained nor stored",
    )
    matrix_rate: float | None = Field(
        default=0.04, gt=0, description="Muon's, of the matrices of layers; null: AdamW for all"
    )
    width: int | None = Field(default=None, ge=2, description="unset, 384 of random weights")
    layers: int | None = Field(default=None, ge=1, description="unset, 4")
    inner: int | None = Field(default=None, ge=1, description="in an MLP; unset, 1024")
    heads: int | None = Field(default=None, ge=1, description="of attention; unset, 6")
    key_value_heads: int | None = Field(default=None, ge=1, description="unset, 3")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        given = [name for name in _SHAPE if getattr(self, name) is not None]
        if self.copied_layers and given:
            raise ValueError(f"{', '.join(given)}: a draft of copied layers has its target's shape")
        shape = self.shape
        if shape["width"] % (2 * shape["heads"]):
            raise ValueError(
                f"width {shape['width']} is no even multiple of {shape['heads']} heads"
            )
        if shape["heads"] % shape["key_value_heads"]:
            raise ValueError(f"{shape['heads']} heads cannot share {shape['key_value_heads']} keys")
        return self

    @property
    def of_the_shape(self) -> tuple[str, ...]:
        return (*super().of_the_shape, "copied_layers", *_SHAPE)

    @property
    def shape(self) -> dict[str, int]:
        """Of a draft with random weights."""
        return {name: getattr(self, name) or default for name, default in _SHAPE.items()}


class DraftEvaluation(Evaluation):
    """A draft on held-out answers, a token ahead."""

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
