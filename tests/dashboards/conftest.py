"""A small sweep on the tiny pair, really decoded and timed here, without Ray."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import numpy as np
import pandas as pd
import pytest

from specdec_core.config import AUTOREGRESSIVE, Configuration, Sampling
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.heads.card import HeadCard, ReliabilityBin
from specdec_core.drafting.heads.modules import build_head
from specdec_core.drafting.heads.storage import save_head
from specdec_core.drafting.policies.confidence import ConfidenceSettings, SvipSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.heads import SpecDecPlusPlusSettings
from specdec_core.drafting.policies.heuristic import HeuristicSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.engine import Engine, Request
from specdec_core.measure.profiling import profile_pair
from specdec_core.models.pair import Pair
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.search.load.choice import choose_for_load
from specdec_core.search.load.workload import LiveSettings, Workload
from specdec_core.search.results import OraclePoint, SweepResult, Timing, Trial
from specdec_core.tokens.statistics import Counts, paired_ratio, rounds_frame
from tests.load_timer import ALWAYS_FREE, UP_TO_A_DOZEN, Machine
from tests.load_timer import recorded as recorded_texts

NEW_TOKENS = 24
CONFIGURATIONS = [
    AUTOREGRESSIVE,
    *(
        Configuration(drafter=DraftModelSettings(draft="draft", policy=policy))
        for policy in (
            FixedSettings(max_tokens=2),
            FixedSettings(max_tokens=5),
            FixedSettings(max_tokens=8),
            HeuristicSettings(),
            ConfidenceSettings(threshold=0.3),
            ConfidenceSettings(threshold=0.6),
            SvipSettings(threshold=1.2),
        )
    ),
    Configuration(drafter=PromptLookupSettings()),
]
REQUESTS = [Request(f"p{i}", tuple(range(5 + i, 25 + 2 * i)), NEW_TOKENS) for i in range(4)]
PROMPTS = PromptSet(source="prompts.jsonl", count=len(REQUESTS), digest="0" * 64)


@pytest.fixture(scope="session")
def swept(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepResult, Path]:
    """The result and its folder: all configurations counted, three of them timed."""
    folder = tmp_path_factory.mktemp("sweep")
    profile = profile_pair(tiny_pair, widths=(1, 2, 4, 8), contexts=(16, 64), repeats=2)
    engine = Engine(tiny_pair)
    requests = REQUESTS
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
        taken = seconds[configuration.id]
        ratio = paired_ratio(seconds[AUTOREGRESSIVE.id], taken)
        timings.append(
            Timing(
                config_id=configuration.id,
                seconds=taken.tolist(),
                tokens=tokens,
                speedup=ratio.value,
                low=ratio.low,
                high=ratio.high,
                tokens_per_second=sum(tokens) / float(np.median(taken, axis=0).sum()),
            )
        )
    timings[2].tied_with_champion = True
    timings[1].differing_outputs = 1
    result = SweepResult(
        name="tiny",
        started=datetime.now(UTC),
        pair=tiny_pair.spec,
        prompts=PROMPTS,
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


@pytest.fixture
def result(swept: tuple[SweepResult, Path]) -> SweepResult:
    """A copy of the result that may be changed."""
    return swept[0].model_copy(deep=True)


@pytest.fixture(scope="session")
def under_load(
    swept: tuple[SweepResult, Path], tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> SweepResult:
    """The sweep's result with a choice for 1 and 8 clients: with 8 nobody drafts."""
    folder, workload = tmp_path_factory.mktemp("load"), WORKLOAD
    replay = recorded_texts(tiny_pair, folder)
    machine = Machine(replay, workload, UP_TO_A_DOZEN)
    candidates, live = CONFIGURATIONS[1:3], LiveSettings(repeats=2)
    result = swept[0].model_copy(deep=True)
    result.under_load, _ = choose_for_load(
        candidates, replay, ALWAYS_FREE, workload, live, machine, folder / "live"
    )
    chosen = {"configuration": result.under_load.chosen}
    result.trials.append(result.trials[1].model_copy(update=chosen))
    return result


WORKLOAD = Workload(clients=(1, 8), requests=8)
FINGERPRINTS = {"target": "the target's", "draft": "the draft's"}


@pytest.fixture(scope="session")
def with_heads(
    swept: tuple[SweepResult, Path], tmp_path_factory: pytest.TempPathFactory
) -> SweepResult:
    """The sweep's result with configurations of untrained acceptance heads, D × w_rej × h."""
    result = swept[0].model_copy(deep=True)
    root = tmp_path_factory.mktemp("heads")
    for depth in (0, 1):
        for w_rej in (1.0, 6.0):
            folder = root / f"specdecpp-d{depth}-w{w_rej:g}"
            card = HeadCard(
                kind="specdecpp",
                draft="draft",
                depth=depth,
                width=8,
                hidden_size=32,
                top_k=10,
                w_acc=1,
                w_rej=w_rej,
                pair=FINGERPRINTS,
                sampling=Sampling(),
                metrics={"train_kl": 0.3 + depth, "eval_kl": 0.4 + w_rej, "auc": 0.7},
                reliability=[
                    ReliabilityBin(low=p, high=p + 0.1, count=5, predicted=p, accepted=p)
                    for p in (0.2, 0.7)
                ],
            )
            save_head(build_head("specdecpp", 32, 10, depth, 8), card, folder)
            for threshold in (0.3, 0.7):
                policy = SpecDecPlusPlusSettings(head=str(folder), threshold=threshold)
                configuration = Configuration(
                    drafter=DraftModelSettings(draft="draft", policy=policy)
                )
                trial = result.trials[3]
                metrics = trial.metrics | {"estimated_speedup": 0.5 + threshold / 10 + depth / 10}
                result.trials.append(
                    Trial(configuration=configuration, counts=trial.counts, metrics=metrics)
                )
    return result
