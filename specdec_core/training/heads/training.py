"""Training one head on examples in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from specdec_core.drafting.heads.card import Epoch, HeadCard, HeadSpec, HeadTrainingSettings
from specdec_core.drafting.heads.modules import build_head
from specdec_core.drafting.heads.storage import weights_of
from specdec_core.training.heads.examples import DEV, TEST, TRAIN, Examples, training_digest
from specdec_core.training.heads.metrics import (
    auc,
    binary_kl,
    calibration_error,
    reliability,
    weighted_bce,
)
from specdec_core.training.trainer import Loop, ModelTrainer

CHUNK = 16384  # rows of a forward that keeps no gradients


@dataclass(frozen=True)
class TrainedHead:
    """A head on its way to a folder."""

    weights: bytes  # as a safetensors file
    card: HeadCard


@dataclass(frozen=True)
class FinishedHead:
    """A head in its folder. The label is its name; in a search over learning rates it has the
    rate."""

    label: str
    folder: Path
    card: HeadCard


class HeadTraining:
    """Trains a head and keeps the weights of the epoch with the least loss on the dev prompts (the
    paper's eval). The test prompts are used once, at the end. Deterministic in data, specification
    and settings."""

    def __init__(
        self,
        spec: HeadSpec,
        examples: Examples,
        settings: HeadTrainingSettings,
        device: str = "cpu",
    ) -> None:
        self.spec, self.examples, self.settings = spec, examples, settings
        torch.manual_seed(settings.seed)
        self.features = torch.tensor(examples.features, device=device)
        self.labels = torch.tensor(examples.labels, device=device)
        split = torch.tensor(examples.split, device=device)
        self.train_rows, self.eval_rows, self.test_rows = (
            torch.nonzero(split == part).squeeze(-1) for part in (TRAIN, DEV, TEST)
        )
        self.head = build_head(
            spec.kind, examples.hidden_size, examples.top_k, spec.depth, spec.width
        )
        self.head.standardise(torch.tensor(examples.features[examples.split == TRAIN]))
        self.head.dropout = 0.0 if spec.kind == "t2" else settings.dropout
        self.head.to(device)
        self.curve: list[Epoch] = []
        self._losses: list[Tensor] = []  # loss and KL (2) of the batches since the last evaluation

    def run(self) -> TrainedHead:
        """Train the head to the end; the best epoch's head with its figures."""
        settings = self.settings
        with TemporaryDirectory() as folder:
            trainer = ModelTrainer(
                self.head,
                self._loss,
                _ExampleRows(self.features[self.train_rows], self.labels[self.train_rows]),
                Path(folder),
                Loop(
                    rate=lambda share: (1 + math.cos(math.pi * share)) / 2,
                    judge=self._judge,
                    evaluations=settings.epochs,
                    save_seconds=math.inf,
                ),
                torch.optim.AdamW(
                    self.head.parameters(),
                    lr=settings.learning_rate,
                    weight_decay=settings.weight_decay,
                    fused=True,
                ),
                per_device_train_batch_size=settings.batch_size,
                max_grad_norm=0.0,
                num_train_epochs=settings.epochs,
                seed=settings.seed,
                use_cpu=self.features.device.type == "cpu",
                save_only_model=True,
            )
            trainer.run()
        self.curve = [
            Epoch(epoch=number, **entry["evaluation"])
            for number, entry in enumerate(trainer.curve, start=1)
        ]
        return self._result()

    def tested(self) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities and labels (n,) of the test rows, by the weights as they are."""
        logits, labels = self._predict(self.test_rows)
        return logits.sigmoid().numpy().astype(np.float64), labels.numpy().astype(np.float64)

    def _loss(self, features: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(features)
        loss = weighted_bce(logits, labels, self.spec.w_acc, self.spec.w_rej)
        self._losses.append(torch.stack((loss.detach(), binary_kl(logits.detach(), labels))))
        return loss

    def _judge(self) -> tuple[float, dict[str, Any]]:
        logits, labels = self._predict(self.eval_rows)
        loss = weighted_bce(logits, labels, self.spec.w_acc, self.spec.w_rej).item()
        train_loss, train_kl = torch.stack(self._losses).mean(0).tolist()
        found = {
            "train_loss": train_loss,
            "train_kl": train_kl,
            "eval_loss": loss,
            "eval_kl": binary_kl(logits, labels).item(),
            "auc": auc(logits.numpy(), labels.numpy()),
        }
        self._losses = []
        return -loss, found

    def _result(self) -> TrainedHead:
        spec, examples = self.spec, self.examples
        weights = weights_of(self.head)
        self.head.load_state_dict(load(weights))  # rounded, as they are stored
        train_logits, train_labels = self._predict(self.train_rows)
        eval_logits, eval_labels = self._predict(self.eval_rows)
        logits, labels = self._predict(self.test_rows)
        bins = reliability(logits.sigmoid().numpy(), labels.numpy())
        metrics = {
            "epoch": min(self.curve, key=lambda e: e.eval_loss).epoch,
            "train_kl": binary_kl(train_logits, train_labels).item(),
            "eval_kl": binary_kl(eval_logits, eval_labels).item(),
            "eval_loss": weighted_bce(eval_logits, eval_labels, spec.w_acc, spec.w_rej).item(),
            "test_kl": binary_kl(logits, labels).item(),
            "auc": auc(logits.numpy(), labels.numpy()),
            "ece": calibration_error(bins),
        }
        shape = spec.model_dump() | ({} if spec.kind == "specdecpp" else {"depth": 0})
        card = HeadCard(
            **shape,
            draft=examples.draft,
            hidden_size=examples.hidden_size,
            top_k=examples.top_k,
            pair=examples.pair,
            sampling=examples.sampling,
            recordings=examples.recordings,
            examples={
                "train": len(self.train_rows),
                "eval": len(self.eval_rows),
                "test": len(self.test_rows),
            },
            settings=self.settings,
            metrics=metrics,
            curve=tuple(self.curve),
            reliability=tuple(bins),
            training=training_digest(spec, examples, self.settings),
        )
        return TrainedHead(weights, card)

    @torch.no_grad()
    def _predict(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and labels of `rows`, on the CPU."""
        self.head.eval()
        logits = [self.head(self.features[part]) for part in rows.split(CHUNK)]
        return torch.cat(logits).cpu(), self.labels[rows].cpu()


@dataclass(frozen=True)
class _ExampleRows:
    """Examples, a batch of rows at a time."""

    features: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, numbers: list[int]) -> dict[str, Any]:
        rows = torch.tensor(numbers, device=self.labels.device)
        batch = {"features": self.features[rows], "labels": self.labels[rows]}
        return {**batch, "count": len(numbers)}
