"""A trained EAGLE head, its folder, and the observer of its training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_core.base.errors import UserError
from specdec_core.base.files import atomic_folder
from specdec_core.base.observer import Observer
from specdec_core.config import Document, load_yaml, parse
from specdec_core.models.eagle import EagleSettings
from specdec_core.models.eagle.formats.speculators import EagleCard
from specdec_core.models.eagle.loading import save_head
from specdec_core.training.eagle.features import RecordedTexts
from specdec_core.training.eagle.settings import EagleTrainingSettings, Evaluation, Progress
from specdec_core.training.eagle.training import EagleTraining

CARD = "training.json"


class TrainingCard(Document):
    """How a head was trained, on what, and how good it is.

    `best` is the evaluation whose weights were kept, of `curve`.
    """

    training: str  # the same digest gives the same head
    fingerprint: str  # the target's
    settings: EagleTrainingSettings
    head: EagleSettings
    texts: dict[str, int]  # trained on, held out
    coverage: float  # the draft vocabulary's share of the tokens of answers held out
    tokens: int
    seconds: float
    best: Evaluation
    curve: tuple[Evaluation, ...]


@dataclass(frozen=True)
class FinishedEagle:
    """A trained head's name, its folder and its card."""

    label: str
    folder: Path
    card: TrainingCard


class EagleObserver(Observer):
    """Follows the training of heads."""

    def advanced(self, label: str, progress: Progress) -> None:
        """A head's training has gone on."""

    def head_finished(self, head: FinishedEagle) -> None:
        """A head is trained and on disk, now or earlier."""


def training_digest(texts: RecordedTexts, settings: EagleTrainingSettings) -> str:
    """Names a training: the same settings, on the same texts."""
    card = texts.card
    read = [card.fingerprint, card.layers, sorted(texts.files), len(texts.texts)]
    return hashlib.sha256(f"{settings.model_dump_json()} {read}".encode()).hexdigest()


def save_finished(training: EagleTraining, folder: Path) -> TrainingCard:
    """Write the head of a finished training into `folder`."""
    head = training.finished()
    card = TrainingCard(
        training=training_digest(training.texts, training.settings),
        fingerprint=training.texts.card.fingerprint,
        settings=training.settings,
        head=head.settings,
        texts={"train": len(training.train), "held_out": len(training.held_out)},
        coverage=training.coverage,
        tokens=training.tokens,
        seconds=training.seconds,
        best=max(training.curve, key=lambda evaluation: evaluation.acceptance.length),
        curve=tuple(training.curve),
    )
    with atomic_folder(folder) as new:
        save_head(head, new, EagleCard(**_facts(training)))
        (new / CARD).write_text(card.model_dump_json(indent=1))
    return card


def _facts(training: EagleTraining) -> dict[str, Any]:
    """What the head's folder says of it to others."""
    target = training.texts.card
    return {
        "target": target.target,
        "target_architectures": tuple(target.config.get("architectures") or ()),
        "target_fingerprint": target.fingerprint,
        "speculative_tokens": training.settings.steps,
        "training": training.settings.model_dump(mode="json"),
    }


def load_card(folder: Path) -> TrainingCard:
    """The card of a trained head. Raises :class:`UserError` where there is none."""
    path = folder / CARD
    return parse(TrainingCard, load_yaml(path), str(path))


def finished_in(folder: Path, label: str, digest: str) -> FinishedEagle | None:
    """The head in the folder, if it is of this very training."""
    try:
        card = load_card(folder)
    except UserError:
        return None
    return FinishedEagle(label, folder, card) if card.training == digest else None
