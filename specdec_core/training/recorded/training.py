"""Training a model on recorded answers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from specdec_core.training.optimiser import Optimiser
from specdec_core.training.recorded.features import RecordedTexts, TextBatch, read_tables
from specdec_core.training.recorded.finished import TrainingCard, training_digest
from specdec_core.training.recorded.loss import working_device, working_type
from specdec_core.training.recorded.settings import Evaluation, TrainingSettings
from specdec_core.training.recorded.vocabulary import count_tokens, coverage, draft_vocabulary
from specdec_core.training.trainer import Loop, LoopReport, ModelTrainer, planned

S = TypeVar("S", bound=TrainingSettings)
E = TypeVar("E", bound=Evaluation)
M = TypeVar("M", bound=nn.Module)

# Gets how far a training is, and its evaluation in words, where one was due.
StandingReport = Callable[[LoopReport, str], None]

_VOCABULARY = 8192  # tokens that a model proposes, unless the settings say how many
_ENDLESS = 10**6  # epochs, where the minutes end a training


class RecordedTraining(ABC, Generic[S, E, M]):
    """Trains a model that proposes some of its target's tokens, and keeps the weights that were
    best on the held-out answers.

    A subclass makes the model, its loss and its evaluation.

    Attributes:
        name: of the folder that the model is put into; `title` is that of its run.
        command: the one that trains such models.
        workspace: the folder of the workspace with all models of the kind.
        judged_at: the temperatures of the answers that evaluations are of; unset, all.
        coverage: the draft vocabulary's share of the tokens of the held-out answers.
        output: the target's output layer's rows of the draft vocabulary.
        device: where the model is trained.
        type: of products; parameters are float32.
        curve: the evaluations.
        tokens: of answers trained on.
        seconds: of training.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    command: ClassVar[str]
    workspace: ClassVar[str]
    judged_at: ClassVar[tuple[float, ...]] = ()
    card_type: ClassVar[type[TrainingCard]]
    evaluation_type: ClassVar[type[Evaluation]]
    reads_features: ClassVar[bool]

    def __init__(self, texts: RecordedTexts, settings: S) -> None:
        self.texts, self.settings = texts, settings
        self.trained_on, held_out = texts.split(self.judged_at)
        self.held_out = held_out[: settings.evaluation_texts]
        tables = read_tables(texts.folder)
        size = len(tables["output"])
        config = target_config(texts.card.config)
        if settings.start:
            model = self._continued(settings.start, config, tables)
            tokens = self._proposable(model)
        else:
            counts = count_tokens(texts.answers(self.trained_on), size)
            most = settings.draft_vocab_size or _VOCABULARY
            tokens = draft_vocabulary(counts, most, texts.card.eos_token_ids)
            model = self._start(config, tables, tokens)
        self.coverage = coverage(count_tokens(texts.answers(held_out), size), tokens)
        self.device = working_device()
        self.type = working_type(self.device)
        self.model = model.to(self.device)
        self.output = tables["output"][tokens].to(self.device, self.type)
        self.curve: list[E] = []
        self.tokens, self.seconds = 0, 0.0

    @abstractmethod
    def _start(
        self, config: PretrainedConfig, tables: Mapping[str, Tensor], proposable: Tensor
    ) -> M:
        """The model to train, which proposes these tokens of the target's with these tables."""

    @abstractmethod
    def _continued(self, name: str, config: PretrainedConfig, tables: Mapping[str, Tensor]) -> M:
        """The trained model of that name, to train it further with these tables of the target's.
        Raises :class:`UserError` where there is no such model for this target."""

    @abstractmethod
    def _proposable(self, model: M) -> Tensor:
        """The tokens of the target's that the model proposes."""

    @abstractmethod
    def loss(self, batch: TextBatch) -> Tensor:
        """The mean loss of a batch, in autocast."""

    @abstractmethod
    def judge(self, batches: Iterable[TextBatch]) -> E:
        """The evaluation of the present model; in autocast, without gradients."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the trained model into `folder`, with its card."""

    def run(self, checkpoints: Path, report: StandingReport = lambda *_: None) -> None:
        """Train to the end, resuming from the last of the `checkpoints`."""
        trainer = self._trainer(checkpoints, report)
        trainer.run()
        self.curve = [self._evaluation(entry) for entry in trainer.curve]
        self.tokens, self.seconds = trainer.count, trainer.seconds

    @property
    def card_values(self) -> dict[str, Any]:
        """The values of the card of a training that has ended."""
        return {
            "training": training_digest(self.texts, self.settings),
            "fingerprint": self.texts.card.fingerprint,
            "settings": self.settings,
            "texts": {"train": len(self.trained_on), "held_out": len(self.held_out)},
            "coverage": self.coverage,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "best": max(self.curve, key=lambda evaluation: evaluation.score),
            "curve": tuple(self.curve),
        }

    def _trainer(self, checkpoints: Path, report: StandingReport) -> ModelTrainer:
        settings = self.settings
        loop = Loop(
            rate=lambda share: rate(share, settings.warmup),
            minutes=settings.minutes,
            judge=self._judged,
            evaluations=settings.evaluations,
            judges_start=settings.start is not None,
            patience=settings.patience,
            report=lambda standing: report(standing, self._summary(standing)),
        )
        return ModelTrainer(
            self.model,
            lambda **batch: self.loss(TextBatch(**batch)),
            self._batches(self.trained_on),
            checkpoints,
            loop,
            Optimiser(
                self.model,
                settings.matrix_rate,
                settings.learning_rate,
                settings.weight_decay,
                settings.weight_decay,
            ),
            max_grad_norm=settings.clip,
            num_train_epochs=_ENDLESS if settings.minutes else settings.epochs,
            seed=settings.seed,
            use_cpu=self.device.type == "cpu",
            bf16=self.type == torch.bfloat16,
        )

    def _judged(self) -> tuple[float, dict[str, Any]]:
        found = self.judge(self._batches(self.held_out))
        return found.score, found.model_dump(mode="json")

    def _batches(self, numbers: Sequence[int]) -> _TextBatches:
        most = self.settings.batch_tokens
        return _TextBatches(self.texts, numbers, most, self.reads_features, self.device)

    def _evaluation(self, entry: Mapping[str, Any]) -> E:
        at = {"share": entry["share"], "tokens": entry["count"], "loss": entry["loss"]}
        found: Any = self.evaluation_type.model_validate({**entry["evaluation"], **at})
        evaluation: E = found
        return evaluation

    def _summary(self, standing: LoopReport) -> str:
        """The evaluation in words; empty where none was due."""
        if standing.evaluation is None:
            return ""
        return self.evaluation_type.model_validate(standing.evaluation).summary


class _TextBatches:
    """Recorded texts in batches of at most `most` tokens of answers."""

    def __init__(
        self,
        texts: RecordedTexts,
        numbers: Sequence[int],
        most: int,
        features: bool,
        device: torch.device,
    ) -> None:
        self.texts, self.features, self.device = texts, features, device
        lengths = [texts.texts[number].length for number in numbers]
        self.plan = [[numbers[n] for n in batch] for batch in planned(lengths, most)]

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[TextBatch]:
        batches = (self.texts.batch(numbers, self.features) for numbers in self.plan)
        return (batch.to(self.device) for batch in batches)

    def __getitems__(self, numbers: list[int]) -> dict[str, Any]:
        [number] = numbers
        batch = self.texts.batch(self.plan[number], self.features).to(self.device)
        return {**vars(batch), "count": int(batch.lengths.sum())}


def rate(share: float, warmup: float) -> float:
    """The learning rate over its peak, at a share of the training."""
    if share < warmup:
        return (share + 1e-3) / (warmup + 1e-3)
    return (1 + math.cos(math.pi * (share - warmup) / (1 - warmup))) / 2


def target_config(values: Mapping[str, Any]) -> PretrainedConfig:
    """A target's configuration, of what a folder of features says of it."""
    others = {key: value for key, value in values.items() if key != "model_type"}
    config: PretrainedConfig = AutoConfig.for_model(values["model_type"], **others)
    return config
