"""The race of a sweep's finalists: who goes on, when it ends, who wins."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from cluster.sweep.racing import run_race
from cluster.sweep.timing import InterleavedTimes
from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.confidence import ConfidenceSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.engine import Request
from specdec_core.search.plan import SweepSettings
from specdec_core.search.results import RaceSummary
from specdec_core.tokens.statistics import Generation

FIXED = Configuration(drafter=DraftModelSettings(policy=FixedSettings(max_tokens=3)))
CONFIDENT = Configuration(drafter=DraftModelSettings(policy=ConfidenceSettings()))
LOOKUP = Configuration(drafter=PromptLookupSettings())


def raced(
    means: dict[Configuration, float], further: int = 0, **settings: Any
) -> tuple[InterleavedTimes, RaceSummary, Counter[tuple[str, int]]]:
    """A race on 12 prompts, of other sizes, with 5 % noise; and how often each was decoded."""
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(0, 0.4, 12 + further)
    decoded: Counter[tuple[str, int]] = Counter()

    def decode(configuration: Configuration, request: Request) -> tuple[float, Generation]:
        decoded[configuration.id, request.seed] += 1
        seconds = means[configuration] * sizes[request.seed] * rng.normal(1, 0.05)
        return seconds, Generation(request.id, 5, [1] * 10, "", [], [], "length")

    requests = [Request(str(n), (1,), 10, seed=n) for n in range(12 + further)]
    plan = SweepSettings(**settings)
    watch, summary = run_race(
        list(means), requests[:12], requests[12:], decode, lambda: None, plan, Observer()
    )
    return watch, summary, decoded


def test_the_fastest_is_champion_and_only_those_in_question_are_decoded_again() -> None:
    means = {AUTOREGRESSIVE: 1.0, FIXED: 0.5, CONFIDENT: 0.505, LOOKUP: 0.8}
    watch, summary, decoded = raced(means, further=40)
    assert summary.champion in (FIXED.id, CONFIDENT.id)
    assert set(summary.in_question) <= {FIXED.id, CONFIDENT.id}
    assert all(decoded[AUTOREGRESSIVE.id, seed] == 1 for seed in range(12))
    assert decoded[AUTOREGRESSIVE.id, 51] == 0
    assert decoded[summary.champion, 51] > 0
    assert watch.timing(LOOKUP, AUTOREGRESSIVE).speedup == pytest.approx(1.25, rel=0.05)
    assert summary.loss < 0.02
    assert summary.prompts == 52


def test_a_race_ends_when_the_choice_is_good_enough_or_the_time_is_used() -> None:
    clear = {AUTOREGRESSIVE: 1.0, FIXED: 0.5}
    assert raced(clear, further=40)[1].laps < 20
    close = {AUTOREGRESSIVE: 1.0, FIXED: 0.5, CONFIDENT: 0.5}
    assert raced(close, repeats=9)[1].laps == 9 * 12
    assert raced(close, repeats=9, race={"seconds": 0})[1].laps == 12
    assert raced(close, repeats=9, race={"within": 0.5})[1].laps < 40


def test_autoregressive_decoding_is_champion_where_nothing_is_faster() -> None:
    summary = raced({AUTOREGRESSIVE: 1.0, FIXED: 1.5})[1]
    assert summary.champion == AUTOREGRESSIVE.id
    assert summary.at_most == 0
