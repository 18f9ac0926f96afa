"""A head's kind, training data and metrics: the JSON file next to its weights.

Rows are split by prompt: `train`, `eval` (dev, on which the epoch and the learning rate are chosen)
and `test`. Cards without `test` rows are of an earlier version; their figures are on `eval`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from specdec_core.config import Sampling, Value
from specdec_core.drafting.heads.modules import HeadKind


class HeadSpec(Value):
    """One entry of the grid that is trained."""

    kind: HeadKind = "specdecpp"
    depth: int = Field(default=3, ge=0, le=16, description="specdecpp: residual blocks D")
    width: int = Field(default=64, ge=1, description="decision models: units of a hidden layer")
    w_acc: float = Field(default=1.0, gt=0)
    w_rej: float = Field(default=1.0, gt=0)

    @property
    def label(self) -> str:
        """`specdecpp-d3-w6`, `t1`, `t2-w3`: readable, and a folder's name."""
        depth = f"-d{self.depth}" if self.kind == "specdecpp" else ""
        weight = self.w_rej / self.w_acc
        shown = f"-w{weight:g}" if depth or weight != 1 else ""
        return f"{self.kind}{depth}{shown}"


class HeadTrainingSettings(Value):
    """Adam with a cosine schedule to zero (SpecDec++, App. D.1, with batches and a learning rate
    for small heads)."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    batch_size: Annotated[int, Field(ge=1)] = 256
    epochs: Annotated[int, Field(ge=1)] = 6
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # decoupled from the gradient
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.2  # not of T2, which has few inputs
    seed: int = 0


class Epoch(Value):
    """How training stands after an epoch. Train figures are means over the epoch's batches; KL is
    unweighted, in nats. Eval figures and the AUC are on the dev prompts."""

    epoch: int
    train_loss: float
    train_kl: float
    eval_loss: float
    eval_kl: float
    auc: float


class ReliabilityBin(Value):
    """Candidates with a predicted probability in [low, high)."""

    low: float
    high: float
    count: int
    predicted: float  # mean prediction
    accepted: float  # mean label


class HeadCard(Value):
    """Everything about a head but its weights."""

    version: Literal[1] = 1
    kind: HeadKind
    draft: str = Field(description="name of the draft in the recorded pair")
    depth: int
    width: int
    hidden_size: int
    top_k: int
    w_acc: float
    w_rej: float
    pair: dict[str, str] = Field(description="fingerprints of `target` and `draft`")
    sampling: Sampling = Field(description="of the recordings that the head was trained on")
    recordings: tuple[str, ...] = Field(default=(), description="digests of the recordings")
    examples: dict[str, int] = Field(default={}, description="number of rows of each split")
    settings: HeadTrainingSettings = HeadTrainingSettings()
    metrics: dict[str, float] = Field(
        default={},
        description="of the kept epoch: train_kl; eval_kl, eval_loss; on test test_kl, auc, ece",
    )
    curve: tuple[Epoch, ...] = ()
    reliability: tuple[ReliabilityBin, ...] = Field(default=(), description="on the test rows")
    training: str = Field(default="", description="digest of data, settings and spec")
    weights: str = Field(default="", description="SHA-256 of model.safetensors")
