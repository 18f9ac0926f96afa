"""The card of a trained model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import SerializeAsAny

from specdec_core.base.errors import UserError
from specdec_core.config import Stored
from specdec_core.models.fingerprints import fingerprint
from specdec_core.training.recorded.features import RecordedTexts
from specdec_core.training.recorded.settings import Evaluation, TrainingSettings


class TrainingCard(Stored):
    """How a model was trained, on what, and how good it is.

    `best` is the evaluation of `curve` with the weights that were kept. A subclass names the types
    of settings and evaluations.
    """

    FILE: ClassVar[str] = "training.json"
    WHAT: ClassVar[str] = "trained model"

    training: str  # the same digest gives the same model
    fingerprint: str  # the target's
    settings: SerializeAsAny[TrainingSettings]
    texts: dict[str, int]  # trained on, held out
    coverage: float  # the draft vocabulary's share of the tokens of held-out answers
    tokens: int
    seconds: float
    best: SerializeAsAny[Evaluation]
    curve: tuple[SerializeAsAny[Evaluation], ...]


C = TypeVar("C", bound=TrainingCard)


def training_digest(texts: RecordedTexts, settings: TrainingSettings) -> str:
    """Names a training: the same settings and start, on the same texts. Raises :class:`UserError`
    where there is no such start."""
    card = texts.card
    read = [card.fingerprint, card.layers, sorted(texts.files), len(texts.texts), card.identity]
    start = fingerprint(settings.start) if settings.start else ""
    return hashlib.sha256(f"{settings.model_dump_json()} {read} {start}".encode()).hexdigest()


def finished_in(folder: Path, digest: str, kind: type[C]) -> C | None:
    """The card of the model in the folder, if it is of this very training."""
    try:
        card = kind.load(folder)
    except UserError:
        return None
    return card if card.training == digest else None
