"""A tiny target, its recorded answers and their features."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_core.config import Sampling
from specdec_core.engine import Request
from specdec_core.models.pair import Pair, load_pair
from specdec_core.recordings.find import finish
from specdec_core.recordings.record import record_requests
from specdec_core.training.recorded.features import RecordedAnswers, RecordedTexts, record_features
from specdec_core.training.recorded.training import RecordedTraining

LAYERS = (0, 1, 2)
PROMPTS = 200
LONGEST = 400


@dataclass(frozen=True)
class Recorded:
    """The folder of features of answers, and the texts in it."""

    features: Path
    texts: RecordedTexts


def recorded_answers(
    pair: Pair,
    folder: Path,
    prompts: int = PROMPTS,
    new_tokens: int = 24,
    temperatures: Sequence[float] = (0.0, 1.0),
) -> RecordedAnswers:
    """Recordings of the target's answers to `prompts` prompts of 2 to 6 tokens, one for each
    temperature."""
    alone = load_pair(pair.spec.model_copy(update={"drafts": {}}))
    found = []
    for first, temperature in enumerate(temperatures):
        requests = [
            Request(f"p{n}", tuple(range(3 + n, 5 + n + n % 5)), new_tokens, seed=n)
            for n in range(first, prompts, len(temperatures))
        ]
        sampling = Sampling(temperature=temperature)
        found.append(record_requests(alone, requests, folder / str(first), sampling=sampling))
    for each in found:
        finish(each.folder)
    return RecordedAnswers(found, LONGEST)


def unpacked(pair: Pair) -> Pair:
    """The pair's target with its weights as they are."""
    return load_pair(pair.spec.with_runner(pack=False).model_copy(update={"drafts": {}}))


@torch.no_grad()
def evaluated(training: RecordedTraining[Any, Any, Any]) -> Any:
    """The evaluation of the present model on the held-out answers."""
    narrow = training.type != torch.float32
    with torch.autocast(training.device.type, training.type, enabled=narrow):
        return training.judge(training._batches(training.held_out))


@pytest.fixture(scope="session")
def recorded(tiny_pair, tmp_path_factory):
    root = tmp_path_factory.mktemp("eagle")
    answers, features = recorded_answers(tiny_pair, root / "answers"), root / "features"
    record_features(unpacked(tiny_pair), LAYERS, answers, features)
    return Recorded(features, RecordedTexts(features))
