"""A tiny target, its recorded answers and their features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from specdec_core.config import Sampling
from specdec_core.engine import Request
from specdec_core.models.pair import Pair, load_pair
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.recordings.record import Recorder
from specdec_core.recordings.schema import Header, Recording, save_header, write_shard
from specdec_core.training.recorded.features import (
    RecordedAnswers,
    RecordedTexts,
    record_features,
)

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
    for number, temperature in enumerate(temperatures):
        header = Header(
            pair=alone.spec,
            fingerprints=alone.fingerprints,
            eos_token_ids=tuple(alone.eos_token_ids),
            prompts=PromptSet(source="numbers", count=prompts, digest=str(prompts)),
            sampling=Sampling(temperature=temperature),
            max_new_tokens=new_tokens,
        )
        requests = [
            (n, Request(f"p{n}", tuple(range(3 + n, 5 + n + n % 5)), new_tokens, seed=n))
            for n in range(number, prompts, len(temperatures))
        ]
        save_header(header, folder / str(number))
        write_shard(Recorder(alone, header).record(requests), folder / str(number), 0)
        found.append(Recording.open(folder / str(number)))
    return RecordedAnswers(found, LONGEST)


def unpacked(pair: Pair) -> Pair:
    """The pair's target with its weights as they are."""
    runner = pair.spec.runner.model_copy(update={"pack": False})
    return load_pair(pair.spec.model_copy(update={"runner": runner, "drafts": {}}))


@pytest.fixture(scope="session")
def recorded(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    root = tmp_path_factory.mktemp("eagle")
    answers, features = recorded_answers(tiny_pair, root / "answers"), root / "features"
    record_features(unpacked(tiny_pair), LAYERS, answers, features)
    return Recorded(features, RecordedTexts(features))
