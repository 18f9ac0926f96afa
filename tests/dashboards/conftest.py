"""A small sweep on the tiny pair, really decoded and timed here, without Ray."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import numpy as np
import pandas as pd
import pytest

from specdec_core.config import (
    AUTOREGRESSIVE,
    ConfidencePolicy,
    Configuration,
    DraftModelDrafter,
    FixedPolicy,
    HeuristicPolicy,
    PromptLookupDrafter,
    SvipPolicy,
)
from specdec_core.cost import profile_pair
from specdec_core.engine import Engine, Request
from specdec_core.pair import Pair
from specdec_core.results import OraclePoint, PromptSet, SweepResult, Timing, Trial
from specdec_core.stats import Counts, paired_ratio, rounds_frame

NEW_TOKENS = 24
CONFIGURATIONS = [
    AUTOREGRESSIVE,
    *(
        Configuration(drafter=DraftModelDrafter(draft="draft", policy=policy))
        for policy in (
            FixedPolicy(max_tokens=2),
            FixedPolicy(max_tokens=5),
            FixedPolicy(max_tokens=8),
            HeuristicPolicy(),
            ConfidencePolicy(threshold=0.3),
            ConfidencePolicy(threshold=0.6),
            SvipPolicy(threshold=1.2),
        )
    ),
    Configuration(drafter=PromptLookupDrafter()),
]


@pytest.fixture(scope="session")
def swept(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepResult, Path]:
    """The result and its folder: all configurations counted, three of them timed."""
    folder = tmp_path_factory.mktemp("sweep")
    profile = profile_pair(tiny_pair, widths=(1, 2, 4, 8), contexts=(16, 64), repeats=2)
    engine = Engine(tiny_pair)
    requests = [Request(f"p{i}", tuple(range(5 + i, 25 + 2 * i)), NEW_TOKENS) for i in range(4)]
    trials, frames = [], []
    for configuration in CONFIGURATIONS:
        engine.configure(configuration)
        generations = engine.generate(requests)
        counts = Counts.of(generations)
        draft = getattr(configuration.drafter, "draft", None)
        metrics = counts.metrics() | {"estimated_speedup": profile.speedup(counts, draft)}
        trials.append(Trial(configuration=configuration, counts=counts.as_dict(), metrics=metrics))
        frames.append(rounds_frame(generations, config_id=configuration.id))

    finalists = [AUTOREGRESSIVE, CONFIGURATIONS[5], CONFIGURATIONS[2], CONFIGURATIONS[1]]
    seconds = {c.id: np.zeros((2, len(requests))) for c in finalists}
    for repeat in range(2):
        for configuration in finalists:
            engine.configure(configuration)
            for i, request in enumerate(requests):
                start = perf_counter()
                engine.generate([request])
                seconds[configuration.id][repeat, i] = perf_counter() - start
    tokens = [NEW_TOKENS] * len(requests)
    timings = []
    for configuration in finalists:
        own = seconds[configuration.id]
        ratio = paired_ratio(seconds[AUTOREGRESSIVE.id], own)
        timings.append(
            Timing(
                config_id=configuration.id,
                seconds=own.tolist(),
                tokens=tokens,
                speedup=ratio.value,
                low=ratio.low,
                high=ratio.high,
                tokens_per_second=sum(tokens) / float(np.median(own, axis=0).sum()),
            )
        )
    timings[2].tied_with_champion = True
    timings[1].differing_outputs = 1
    result = SweepResult(
        name="tiny",
        started=datetime.now(UTC),
        pair=tiny_pair.spec,
        prompts=PromptSet(source="prompts.jsonl", count=len(requests), digest="0" * 64),
        max_new_tokens=NEW_TOKENS,
        profile=profile,
        trials=trials,
        oracles=[OraclePoint(draft="draft", verification_rate=0.1, speedup=3.0)],
        autoregressive=timings[0],
        timings=timings[1:],
        champion=timings[1].config_id,
        environment={"python": platform.python_version()},
    )
    pd.concat(frames, ignore_index=True).to_parquet(folder / "rounds.parquet")
    result.save(folder)
    return result, folder
