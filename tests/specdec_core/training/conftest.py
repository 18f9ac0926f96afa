"""A tiny target, its answers and their features."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from specdec_core.models.pair import Pair, load_pair
from specdec_core.training.recorded.answers import AnswersCard, write_answers
from specdec_core.training.recorded.features import RecordedTexts, record_features

LAYERS = (0, 1, 2)
PROMPTS = 200


@dataclass(frozen=True)
class Recorded:
    """Folders of answers and of their features, and the texts in them."""

    answers: Path
    features: Path
    texts: RecordedTexts


def answer_prompts(pair: Pair, folder: Path, prompts: int = PROMPTS, new_tokens: int = 24) -> None:
    """Have the target answer `prompts` prompts of 2 to 6 tokens, every second one greedily."""
    given = [(f"p/{n}", tuple(range(3 + n, 5 + n + n % 5))) for n in range(prompts)]
    card = AnswersCard(
        target=pair.spec.target,
        fingerprint=pair.fingerprints["target"],
        prompts=prompts,
        digest=hashlib.sha256(repr(given).encode()).hexdigest(),
        max_new_tokens=new_tokens,
        temperatures=(0.0, 1.0),
    )
    write_answers(pair, given, card, folder, slots=16)


def unpacked(pair: Pair) -> Pair:
    """The pair's target with its weights as they are."""
    runner = pair.spec.runner.model_copy(update={"pack": False})
    return load_pair(pair.spec.model_copy(update={"runner": runner, "drafts": {}}))


@pytest.fixture(scope="session")
def recorded(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    root = tmp_path_factory.mktemp("eagle")
    answers, features = root / "answers", root / "features"
    answer_prompts(tiny_pair, answers)
    record_features(unpacked(tiny_pair), LAYERS, answers, features)
    return Recorded(answers, features, RecordedTexts(features))
