"""A trained model, its folder and card, and the observer of its training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import SerializeAsAny

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import Document, load_yaml, parse
from specdec_core.config.wording import count
from specdec_core.training.recorded.features import RecordedTexts
from specdec_core.training.recorded.settings import Evaluation, Progress, TrainingSettings
from specdec_core.training.recorded.training import RecordedTraining

CARD = "training.json"


class TrainingCard(Document):
    """How a model was trained, on what, and how good it is.

    `best` is the evaluation of `curve` with the weights that were kept. A subclass names the types
    of settings and evaluations.
    """

    training: str  # the same digest gives the same model
    fingerprint: str  # the target's
    settings: SerializeAsAny[TrainingSettings]
    texts: dict[str, int]  # trained on, held out
    coverage: float  # the draft vocabulary's share of the tokens of held-out answers
    tokens: int
    seconds: float
    best: SerializeAsAny[Evaluation]
    curve: tuple[SerializeAsAny[Evaluation], ...]


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
        """A model's training has progressed."""

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
        "texts": {"train": len(training.trained_on), "held_out": len(training.held_out)},
        "coverage": training.coverage,
        "tokens": training.tokens,
        "seconds": training.seconds,
        "best": max(training.curve, key=lambda evaluation: evaluation.score),
        "curve": tuple(training.curve),
    }


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


def readme(
    name: str, card: TrainingCard, option: str, about: str, figures: list[str], loss: str, end: str
) -> str:
    """The README of a model that is shipped, in Markdown.

    Args:
        name: what commands call the model.
        card: of its training.
        option: the words by which `specdec sweep` uses it.
        about: a paragraph that describes it.
        figures: lines on how good it is.
        loss: a sentence on what was minimised.
        end: Markdown on what no card knows: the prompts' origin, licences.
    """
    settings = card.settings
    lines = [
        f"# {name}",
        about,
        "",
        "```",
        f"specdec sweep {option} --prompts prompts.jsonl",
        "```",
        "",
        "## Figures",
        *figures,
        "",
        "## Recipe",
        f"- *Texts*: the target's own answers to {card.texts['train']:,} prompts.",
        f"- *Loss*: {loss}",
        f"- *Optimizer*: AdamW, rate {settings.learning_rate:g}, {settings.batch_tokens} tokens of"
        f" answers a batch, seed {settings.seed}; {card.tokens:,} tokens in"
        f" {card.seconds / 60:.0f} minutes.",
        f"- *Kept*: the best of {count(len(card.curve), 'evaluation')}, after {card.best.tokens:,}"
        f" tokens. `{CARD}` has all of them.",
        "",
        *([end.strip(), ""] if end else []),
    ]
    return "\n".join(lines)
