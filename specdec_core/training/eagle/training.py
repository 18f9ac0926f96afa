"""Training an EAGLE-3 head on recorded features, with a checkpoint to go on from."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from specdec_core.base.files import atomic_path
from specdec_core.models.eagle import EagleHead, EagleSettings
from specdec_core.training.eagle.acceptance import AcceptanceCounts
from specdec_core.training.eagle.batch import Batch
from specdec_core.training.eagle.features import RecordedTexts, read_tables
from specdec_core.training.eagle.loss import cross_entropy, probabilities
from specdec_core.training.eagle.precision import working_type
from specdec_core.training.eagle.schedule import plan_epoch, rate
from specdec_core.training.eagle.settings import EagleTrainingSettings, Evaluation, Progress
from specdec_core.training.eagle.start import start_head
from specdec_core.training.eagle.unrolled import Step, unroll
from specdec_core.training.eagle.vocabulary import count_tokens, coverage, draft_vocabulary

_BETAS = (0.9, 0.95)
# What a checkpoint holds beside weights, optimizer and curve.
_COUNTERS = ("epoch", "batch", "tokens", "seconds", "loss", "marks")


class EagleTraining:
    """Trains a head, goes on from the checkpoint at `checkpoint`, and keeps the weights that were
    best on the texts held out.

    Attributes:
        coverage: the draft vocabulary's share of the tokens of the answers held out.
        curve: the evaluations so far.
    """

    def __init__(
        self,
        texts: RecordedTexts,
        settings: EagleTrainingSettings,
        checkpoint: Path,
    ) -> None:
        self.texts, self.settings, self.checkpoint = texts, settings, checkpoint
        self.train, held_out = texts.split()
        self.held_out = held_out[: settings.evaluation_texts]
        tables = read_tables(texts.folder)
        counts = count_tokens(texts.answers(self.train), len(tables["output"]))
        tokens = draft_vocabulary(counts, settings.draft_vocab_size, texts.card.eos_token_ids)
        unseen = count_tokens(texts.answers(held_out), len(tables["output"]))
        self.coverage = coverage(unseen, tokens)
        config = target_config(texts.card.config)
        shape = EagleSettings.for_target(config, len(tokens), feature_layers=texts.card.layers)
        self.head = start_head(shape, tables, tokens, settings.seed)
        self.type = working_type()  # of products; parameters are float32
        self.output = tables["output"][tokens].to(self.type)
        self.parameters = [p for p in self.head.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.learning_rate,
            betas=_BETAS,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.epoch = self.batch = self.tokens = self.marks = 0
        self.seconds = self.loss = 0.0
        self.curve: list[Evaluation] = []
        self.best = self._weights()
        self._plan()
        if checkpoint.exists():
            self._resume()

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
        lengths = [evaluation.acceptance.length for evaluation in self.curve]
        return len(lengths) - _first_best(lengths) > self.settings.patience

    @property
    def progress(self) -> Progress:
        """How far it is."""
        return Progress(share=self.share, loss=self.loss, tokens=self.tokens, seconds=self.seconds)

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

    def finished(self) -> EagleHead:
        """The head as it was at the best evaluation."""
        self.head.load_state_dict(self.best, strict=False)
        return self.head

    def _step(self) -> None:
        begun = time.monotonic()
        settings = self.settings
        batch = self.texts.batch(self.batches[self.batch])
        place = np.random.SeedSequence([settings.seed, self.epoch, self.batch])
        generator = torch.Generator().manual_seed(int(place.generate_state(1)[0]))
        with self._autocast():
            steps = unroll(self.head, self._typed(batch), settings.steps, settings.share, generator)
            loss = self._loss(batch, steps)
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

    def _loss(self, batch: Batch, steps: list[Step]) -> Tensor:
        """The mean over chains of the sum over steps."""
        answered = torch.arange(batch.chains) < batch.lengths[:, None]
        target = probabilities(batch.last[answered], batch.normaliser[answered], self.output)
        first = batch.lengths.cumsum(0) - batch.lengths
        states = self.head.norm(torch.cat([step.states for step in steps]))
        places = torch.cat([first[step.texts] + step.positions for step in steps])
        return cross_entropy(states, self.head.lm_head.weight, target, places) / len(target)

    @torch.no_grad()
    def _evaluate(self) -> Evaluation:
        settings = self.settings
        counts = AcceptanceCounts(settings.steps)
        lengths = {number: self.texts.texts[number].length for number in self.held_out}
        for numbers in plan_epoch(self.held_out, lengths, settings.batch_tokens, 0, 0):
            batch = self.texts.batch(numbers)
            with self._autocast():
                steps = unroll(self.head, self._typed(batch), settings.steps)
                counts.add(self.head, batch, steps, self.output)
        evaluation = Evaluation(
            share=self.share, tokens=self.tokens, loss=self.loss, acceptance=counts.result()
        )
        if all(evaluation.acceptance.length > e.acceptance.length for e in self.curve):
            self.best = self._weights()
        self.curve.append(evaluation)
        self.marks = self._passed
        return evaluation

    def _plan(self) -> None:
        lengths = {number: self.texts.texts[number].length for number in self.train}
        self.batches = plan_epoch(
            self.train, lengths, self.settings.batch_tokens, self.settings.seed, self.epoch
        )

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", self.type, enabled=self.type != torch.float32)

    def _typed(self, batch: Batch) -> Batch:
        return replace(batch, features=batch.features.to(self.type))

    def _weights(self) -> dict[str, Tensor]:
        """A copy of what is trained."""
        named = self.head.named_parameters()
        return {name: p.detach().clone() for name, p in named if p.requires_grad}

    def _save(self) -> None:
        state = {
            "weights": self._weights(),
            "best": self.best,
            "optimizer": self.optimizer.state_dict(),
            "curve": [evaluation.model_dump(mode="json") for evaluation in self.curve],
            **{name: getattr(self, name) for name in _COUNTERS},
        }
        with atomic_path(self.checkpoint) as path:
            torch.save(state, path)

    def _resume(self) -> None:
        state: dict[str, Any] = torch.load(self.checkpoint, weights_only=True)
        self.head.load_state_dict(state["weights"], strict=False)
        self.best = state["best"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.curve = [Evaluation.model_validate(evaluation) for evaluation in state["curve"]]
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self._plan()


def target_config(values: Mapping[str, Any]) -> PretrainedConfig:
    """A target's configuration, of what a folder of features says of it."""
    others = {key: value for key, value in values.items() if key != "model_type"}
    config: PretrainedConfig = AutoConfig.for_model(values["model_type"], **others)
    return config


def _first_best(lengths: Sequence[float]) -> int:
    """The number, from 1, of the first of the largest ones; 0 for none."""
    return lengths.index(max(lengths)) + 1 if lengths else 0
