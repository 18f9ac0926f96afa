"""A trained model, its folder, and the observer of its training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import SerializeAsAny

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import Document, load_yaml, parse
from specdec_core.training.recorded.features import RecordedTexts
from specdec_core.training.recorded.settings import Evaluation, Progress, TrainingSettings
from specdec_core.training.recorded.training import RecordedTraining

CARD = "training.json"


class TrainingCard(Document):
    """How a model was trained, on what, and how good it is.

    `best` is the evaluation whose weights were kept, of `curve`. A subclass names the types of
    settings and evaluations.
    """

    training: str  # the same digest gives the same model
    fingerprint: str  # the target's
    settings: SerializeAsAny[TrainingSettings]
    texts: dict[str, int]  # trained on, held out
    coverage: float  # the draft vocabulary's share of the tokens of answers held out
    tokens: int
    seconds: float
    best: SerializeAsAny[Evaluation]
    curve: tuple[SerializeAsAny[Evaluation], ...]

    @property
    def limit(self) -> float:
        """The most that what is learned can be."""
        raise NotImplementedError

    def learned(self, evaluation: Any) -> dict[str, float]:
        """Of one of its evaluations, what grows with training, by its name in tables."""
        raise NotImplementedError


C = TypeVar("C", bound=TrainingCard, covariant=True)


@dataclass(frozen=True)
class Finished(Generic[C]):
    """A trained model's name, its folder and its card."""

    label: str
    folder: Path
    card: C


class TrainingObserver(Observer):
    """Follows the training of models."""

    def advanced(self, label: str, progress: Progress) -> None:
        """A model's training has gone on."""

    def model_finished(self, model: Finished[TrainingCard]) -> None:
        """A model is trained and on disk, now or earlier."""


def training_digest(texts: RecordedTexts, settings: TrainingSettings) -> str:
    """Names a training: the same settings, on the same texts."""
    card = texts.card
    read = [card.fingerprint, card.layers, sorted(texts.files), len(texts.texts), card.identity]
    return hashlib.sha256(f"{settings.model_dump_json()} {read}".encode()).hexdigest()


def card_values(training: RecordedTraining[Any, Any, Any]) -> dict[str, Any]:
    """The values of a finished training's card."""
    return {
        "training": training_digest(training.texts, training.settings),
        "fingerprint": training.texts.card.fingerprint,
        "settings": training.settings,
        "texts": {"train": len(training.train), "held_out": len(training.held_out)},
        "coverage": training.coverage,
        "tokens": training.tokens,
        "seconds": training.seconds_before + training.seconds,
        "best": max(training.curve, key=lambda evaluation: evaluation.score),
        "curve": tuple(training.curve),
    }


def trained_after(
    earlier: TrainingCard, texts: RecordedTexts, settings: TrainingSettings, folder: Path
) -> TrainingSettings:
    """The settings of a training that goes on from the one of that card, in `folder`.

    Raises:
        UserError: that one was on other texts, or of a model of another kind or shape.
    """
    if training_digest(texts, earlier.settings) != earlier.training:
        raise UserError(f"{folder}: was trained on other answers, and goes on with the same only")
    schedule = set(TrainingSettings.model_fields)
    before, now = (s.model_dump(exclude=schedule) for s in (earlier.settings, settings))
    for name in now:
        if before[name] != now[name]:
            raise UserError(f"{folder}: was trained with {name} {before[name]}, not {now[name]}")
    return settings.model_copy(update={"after": earlier.training})


def load_card(folder: Path, kind: type[C]) -> C:
    """The card of a trained model. Raises :class:`UserError` where there is none."""
    path = folder / CARD
    return parse(kind, load_yaml(path), str(path))


def finished_in(folder: Path, label: str, digest: str, kind: type[C]) -> Finished[C] | None:
    """The model in the folder, if it is of this very training."""
    try:
        card = load_card(folder, kind)
    except UserError:
        return None
    return Finished(label, folder, card) if card.training == digest else None
