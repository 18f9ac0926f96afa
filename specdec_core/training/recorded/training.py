"""Training a model on recorded answers, with a checkpoint to go on from."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from specdec_core.base.errors import UserError
from specdec_core.base.files import atomic_path
from specdec_core.training.recorded.batch import TextBatch
from specdec_core.training.recorded.features import RecordedTexts, read_tables
from specdec_core.training.recorded.precision import working_type
from specdec_core.training.recorded.schedule import plan_epoch, rate
from specdec_core.training.recorded.settings import Evaluation, Progress, TrainingSettings
from specdec_core.training.recorded.vocabulary import count_tokens, coverage, draft_vocabulary

S = TypeVar("S", bound=TrainingSettings)
E = TypeVar("E", bound=Evaluation)
M = TypeVar("M", bound=nn.Module)

_BETAS = (0.9, 0.95)
# What a checkpoint holds beside weights, optimizer and curve.
_COUNTERS = ("epoch", "batch", "tokens", "seconds", "loss", "marks")
CHECKPOINT = "checkpoint.pt"


class RecordedTraining(ABC, Generic[S, E, M]):
    """Trains a model that proposes some of its target's tokens, goes on from the checkpoint at
    `checkpoint`, and keeps the weights that were best on the texts held out.

    A subclass makes the model, its loss and its evaluation.

    Attributes:
        coverage: the draft vocabulary's share of the tokens of the answers held out.
        curve: the evaluations so far, those of the trainings before it too.
        seconds: of its own work; `seconds_before` are of the trainings before it.
        output: the target's output layer's rows of the draft vocabulary.
        type: of products; parameters are float32.
    """

    evaluation_type: ClassVar[type[Evaluation]]
    reads_features: ClassVar[bool]

    def __init__(
        self, texts: RecordedTexts, settings: S, draft_vocab_size: int, checkpoint: Path
    ) -> None:
        self.texts, self.settings, self.checkpoint = texts, settings, checkpoint
        self.train, held_out = texts.split()
        self.held_out = held_out[: settings.evaluation_texts]
        tables = read_tables(texts.folder)
        counts = count_tokens(texts.answers(self.train), len(tables["output"]))
        tokens = draft_vocabulary(counts, draft_vocab_size, texts.card.eos_token_ids)
        unseen = count_tokens(texts.answers(held_out), len(tables["output"]))
        self.coverage = coverage(unseen, tokens)
        self.model = self._start(target_config(texts.card.config), tables, tokens)
        self.type = working_type()
        self.output = tables["output"][tokens].to(self.type)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.learning_rate,
            betas=_BETAS,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.epoch = self.batch = self.tokens = self.marks = 0
        self.seconds = self.loss = 0.0
        self.curve: list[E] = []
        self.seconds_before = 0.0
        self.order_seed = settings.order_seed
        if settings.after is not None:
            self._begin_after(checkpoint_of(checkpoint.parent.parent, settings.after))
        self.evaluations_before = len(self.curve)
        self.best = self._weights()
        self._plan()
        if checkpoint.exists():
            self._resume()

    @abstractmethod
    def _start(
        self, config: PretrainedConfig, tables: Mapping[str, Tensor], proposable: Tensor
    ) -> M:
        """The model to train, which proposes these tokens of the target's with these tables."""

    @abstractmethod
    def _loss(self, batch: TextBatch, generator: torch.Generator) -> Tensor:
        """The mean loss of a batch, in autocast."""

    @abstractmethod
    def _judge(self, batches: Iterator[TextBatch]) -> dict[str, Any]:
        """An evaluation's own fields, of texts held out; in autocast, without gradients."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the finished model into `folder`, with its card."""

    @property
    def share(self) -> float:
        """Of the training that is done."""
        if self.settings.minutes is not None:
            return min(self.seconds / (60 * self.settings.minutes), 1.0)
        return min((self.epoch + self.batch / len(self.batches)) / self.settings.epochs, 1.0)

    @property
    def done(self) -> bool:
        """Whether its time is spent, or it has not become better for long."""
        if self.share >= 1:
            return self.marks == self._passed
        scores = [evaluation.score for evaluation in self.curve[self.evaluations_before :]]
        return len(scores) - _first_best(scores) > self.settings.patience

    @property
    def progress(self) -> Progress:
        """How far it is."""
        return Progress(
            share=self.share,
            loss=self.loss,
            tokens=self.tokens,
            seconds=self.seconds_before + self.seconds,
        )

    @property
    def _passed(self) -> int:
        """The places for an evaluation that the training has passed."""
        return int(self.share * self.settings.evaluations + 1e-9)

    def advance(self, seconds: float) -> Progress:
        """Train for about so long, or until an evaluation is made; then write the checkpoint."""
        until = self.seconds + seconds
        while self._passed == self.marks and self.seconds < until:
            self._step()
        evaluation = self._evaluate() if self._passed > self.marks else None
        self._save()
        return self.progress.model_copy(update={"evaluation": evaluation})

    def finished(self) -> M:
        """The model as it was at the best evaluation."""
        self.model.load_state_dict(self.best, strict=False)
        return self.model

    def _step(self) -> None:
        begun = time.monotonic()
        settings = self.settings
        batch = self.texts.batch(self.batches[self.batch], self.reads_features)
        place = np.random.SeedSequence([self.order_seed, self.epoch, self.batch])
        generator = torch.Generator().manual_seed(int(place.generate_state(1)[0]))
        with self._autocast():
            loss = self._loss(batch, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, settings.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * rate(self.share, settings.warmup)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tokens += int(batch.lengths.sum())
        self.loss += (loss.item() - self.loss) * (0.02 if self.loss else 1)
        self.batch += 1
        if self.batch == len(self.batches):
            self.epoch, self.batch = self.epoch + 1, 0
            self._plan()
        self.seconds += time.monotonic() - begun

    @torch.no_grad()
    def _evaluate(self) -> E:
        lengths = {number: self.texts.texts[number].length for number in self.held_out}
        plan = plan_epoch(self.held_out, lengths, self.settings.batch_tokens, 0, 0)
        batches = (self.texts.batch(numbers, self.reads_features) for numbers in plan)
        with self._autocast():
            found = self._judge(batches)
        values = {"share": self.share, "tokens": self.tokens, "loss": self.loss, **found}
        evaluation: Any = self.evaluation_type.model_validate(values)
        if all(evaluation.score > earlier.score for earlier in self.curve):
            self.best = self._weights()
        self.curve.append(evaluation)
        self.marks = self._passed
        return self.curve[-1]

    def _plan(self) -> None:
        lengths = {number: self.texts.texts[number].length for number in self.train}
        self.batches = plan_epoch(
            self.train, lengths, self.settings.batch_tokens, self.order_seed, self.epoch
        )

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", self.type, enabled=self.type != torch.float32)

    def _weights(self) -> dict[str, Tensor]:
        """A copy of what is trained."""
        named = self.model.named_parameters()
        return {name: p.detach().clone() for name, p in named if p.requires_grad}

    def _save(self) -> None:
        state = {
            "weights": self._weights(),
            "best": self.best,
            "optimizer": self.optimizer.state_dict(),
            "curve": [evaluation.model_dump(mode="json") for evaluation in self.curve],
            "seconds_before": self.seconds_before,
            "order_seed": self.order_seed,
            **{name: getattr(self, name) for name in _COUNTERS},
        }
        with atomic_path(self.checkpoint) as path:
            torch.save(state, path)

    def _resume(self) -> None:
        state: dict[str, Any] = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["weights"], strict=False)
        self.best = state["best"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.curve = self._read_curve(state)
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.order_seed = state["order_seed"]
        self._plan()

    def _begin_after(self, earlier: Path) -> None:
        """Begin with the best weights of an earlier training, counting on from its tokens, its
        seconds and its curve. The optimizer and its rate start anew: a warm restart."""
        state: dict[str, Any] = torch.load(earlier, weights_only=True)
        self.model.load_state_dict(state["best"], strict=False)
        self.curve, self.tokens = self._read_curve(state), state["tokens"]
        self.seconds_before = state["seconds"] + state["seconds_before"]

    def _read_curve(self, state: Mapping[str, Any]) -> list[E]:
        kind: Any = self.evaluation_type
        return [kind.model_validate(evaluation) for evaluation in state["curve"]]


def checkpoint_of(trainings: Path, digest: str) -> Path:
    """The checkpoint of the training with that digest, of those in a folder.

    Raises:
        UserError: it is not there.
    """
    for folder in trainings.glob(f"*-{digest[:10]}"):
        if (folder / CHECKPOINT).exists():
            return folder / CHECKPOINT
    raise UserError(f"{trainings}: the checkpoint of training {digest[:10]} is no longer there")


def target_config(values: Mapping[str, Any]) -> PretrainedConfig:
    """A target's configuration, of what a folder of features says of it."""
    others = {key: value for key, value in values.items() if key != "model_type"}
    config: PretrainedConfig = AutoConfig.for_model(values["model_type"], **others)
    return config


def _first_best(scores: Sequence[float]) -> int:
    """The number, from 1, of the first of the largest ones; 0 for none."""
    return scores.index(max(scores)) + 1 if scores else 0
