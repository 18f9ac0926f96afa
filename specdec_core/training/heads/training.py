"""Training one head on examples in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from specdec_core.drafting.heads.card import Epoch, HeadCard, HeadSpec, HeadTrainingSettings
from specdec_core.drafting.heads.metrics import (
    auc,
    binary_kl,
    calibration_error,
    reliability,
    weighted_bce,
)
from specdec_core.drafting.heads.modules import build_head
from specdec_core.drafting.heads.storage import weights_of
from specdec_core.training.heads.examples import DEV, TEST, TRAIN, Examples, training_digest

CHUNK = 16384  # rows of a forward that keeps no gradients


@dataclass(frozen=True)
class TrainedHead:
    """A head on its way to a folder."""

    weights: bytes  # as a safetensors file
    card: HeadCard


class HeadTraining:
    """Trains epoch by epoch and keeps the weights of the one with the least loss on the dev prompts
    (the paper's eval). The test prompts are met once, at the end. Deterministic in
    data, specification and settings."""

    def __init__(
        self,
        spec: HeadSpec,
        examples: Examples,
        settings: HeadTrainingSettings,
        device: str = "cpu",
    ) -> None:
        self.spec, self.examples, self.settings, self.device = spec, examples, settings, device
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
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(),
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.batches = math.ceil(len(self.train_rows) / settings.batch_size)
        self.curve: list[Epoch] = []
        self.best = weights_of(self.head)

    @property
    def done(self) -> bool:
        return len(self.curve) == self.settings.epochs

    def epoch(self) -> Epoch:
        """Pass over the training rows once, in a random order."""
        settings, spec = self.settings, self.spec
        order = self.train_rows[torch.randperm(len(self.train_rows)).to(self.device)]
        loss_sum = kl_sum = 0.0
        self.head.train()
        for step, rows in enumerate(order.split(settings.batch_size)):
            self._set_rate(len(self.curve) * self.batches + step)
            labels = self.labels[rows]
            logits = self.head(self.features[rows])
            loss = weighted_bce(logits, labels, spec.w_acc, spec.w_rej)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            loss_sum += loss.item() * len(rows)
            kl_sum += binary_kl(logits.detach(), labels).item() * len(rows)
        logits, labels = self._predict(self.eval_rows)
        epoch = Epoch(
            epoch=len(self.curve) + 1,
            train_loss=loss_sum / len(order),
            train_kl=kl_sum / len(order),
            eval_loss=weighted_bce(logits, labels, spec.w_acc, spec.w_rej).item(),
            eval_kl=binary_kl(logits, labels).item(),
            auc=auc(logits.numpy(), labels.numpy()),
        )
        if all(epoch.eval_loss < earlier.eval_loss for earlier in self.curve):
            self.best = weights_of(self.head)
        self.curve.append(epoch)
        return epoch

    def result(self) -> TrainedHead:
        """The best epoch's head, with its figures on all rows of each split."""
        spec, examples = self.spec, self.examples
        self.head.load_state_dict(load(self.best))
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
        card = HeadCard(
            kind=spec.kind,
            draft=examples.draft,
            depth=len(self.head.layers) if spec.kind == "specdecpp" else 0,
            width=spec.width,
            hidden_size=examples.hidden_size,
            top_k=examples.top_k,
            w_acc=spec.w_acc,
            w_rej=spec.w_rej,
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
        return TrainedHead(self.best, card)

    def tested(self) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities and labels (n,) of the test rows, by the weights as they are: after
        :meth:`result`, the best epoch's."""
        logits, labels = self._predict(self.test_rows)
        return logits.sigmoid().numpy().astype(np.float64), labels.numpy().astype(np.float64)

    def _set_rate(self, step: int) -> None:
        progress = step / (self.batches * self.settings.epochs)
        rate = self.settings.learning_rate * (1 + math.cos(math.pi * progress)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @torch.no_grad()
    def _predict(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and labels of `rows`, on the CPU."""
        self.head.eval()
        logits = [self.head(self.features[part]) for part in rows.split(CHUNK)]
        return torch.cat(logits).cpu(), self.labels[rows].cpu()
