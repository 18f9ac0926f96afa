"""The numbers that drew a text do not judge what repeats it for a later request of its seed."""

from __future__ import annotations

import numpy as np
import pytest

from research.drift.drift import goodness_of_fit
from research.drift.toy_pair import PROMPT, VOCABULARY, exact_distribution, toy_pair
from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.engine import Engine, Request
from specdec_core.tokens import sampling as sampling_module

COUNTED = 2  # tokens; the last one's candidate comes from the earlier request
WRITTEN = 4
SEEDS = 800


def second_p_value() -> float:
    """Of the second texts of seeds that are used twice, each pair with a memory of its own, against
    the target's distribution."""
    pair, sampling = toy_pair(), Sampling(temperature=1.0)
    configuration = Configuration(drafter=SuffixSettings(memory="all"), sampling=sampling)
    engine, counts = Engine(pair, configuration), np.zeros(VOCABULARY**COUNTED)
    for seed in range(SEEDS):
        engine.configure(configuration)
        for name in ("first", "second"):
            [generation] = engine.generate([Request(name, PROMPT, WRITTEN, seed=seed)])
        first, second = generation.tokens[:COUNTED]
        counts[first * VOCABULARY + second] += 1
    return goodness_of_fit(counts, exact_distribution(pair, sampling, COUNTED))


def test_the_second_text_of_a_seed_has_the_targets_distribution() -> None:
    assert second_p_value() > 1e-3


def test_the_test_notices_numbers_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Again(sampling_module.RandomStream):
        def __init__(self, seed: int, vocab_size: int, written: int = 0, earlier: int = 0) -> None:
            super().__init__(seed, vocab_size, written)

    monkeypatch.setattr("specdec_core.engine.engine.RandomStream", Again)
    assert second_p_value() < 1e-4
