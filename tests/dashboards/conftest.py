"""A small sweep on the tiny pair, really decoded and timed here, without Ray."""

import platform
import shutil
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from time import perf_counter

import pandas as pd
import pytest

from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.heads.card import ReliabilityBin
from specdec_core.drafting.policies.heads import SpecDecPlusPlusSettings
from specdec_core.engine import Engine, Request
from specdec_core.measure.profiling import profile_pair
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.search.load.choice import choose_for_load
from specdec_core.search.load.workload import LiveSettings, Workload
from specdec_core.search.results import OraclePoint, SweepResult, Timing, Trial
from specdec_core.tokens.statistics import Counts, rounds_frame
from tests.configurations import LOOKUP, drafting
from tests.conftest import save_random_head
from tests.load_timer import ALWAYS_FREE, UP_TO_A_DOZEN, Machine
from tests.load_timer import recorded as recorded_texts

NEW_TOKENS = 24
POLICIES = [
    *({"kind": "fixed", "max_tokens": k} for k in (2, 5, 8)),
    {"kind": "heuristic"},
    *({"kind": "confidence", "threshold": h} for h in (0.3, 0.6)),
    {"kind": "svip", "threshold": 1.2},
]
CHAINS = [drafting("draft_model", draft="draft", policy=policy) for policy in POLICIES]
CONFIGURATIONS = [AUTOREGRESSIVE, *CHAINS, LOOKUP]
REQUESTS = [Request(f"p{i}", tuple(range(5 + i, 25 + 2 * i)), NEW_TOKENS) for i in range(4)]
PROMPTS = PromptSet(source="prompts.jsonl", count=len(REQUESTS), digest="0" * 64)


@pytest.fixture(scope="session")
def swept(tiny_pair, tmp_path_factory):
    """The result and its folder: all configurations counted, three of them timed."""
    folder = tmp_path_factory.mktemp("sweep")
    profile = profile_pair(tiny_pair, widths=(1, 2, 4, 8), contexts=(16, 64), repeats=2)
    engine = Engine(tiny_pair)
    trials, decoded = [], {}
    for configuration in CONFIGURATIONS:
        engine.configure(configuration)
        decoded[configuration.id] = engine.generate(REQUESTS)
        counts = Counts.of(decoded[configuration.id])
        draft = getattr(configuration.drafter, "draft", None)
        metrics = counts.metrics() | {"estimated_speedup": profile.speedup(counts, draft)}
        trials.append(Trial(configuration=configuration, counts=counts.as_dict(), metrics=metrics))

    finalists = [AUTOREGRESSIVE, CONFIGURATIONS[5], CONFIGURATIONS[2], CONFIGURATIONS[1]]
    seconds: dict[str, dict[int, list[float]]] = {c.id: {0: [], 1: []} for c in finalists}
    for repeat in range(2):
        for configuration in finalists:
            engine.configure(configuration)
            for request in REQUESTS:
                start = perf_counter()
                engine.generate([request])
                seconds[configuration.id][repeat].append(perf_counter() - start)
    alone = decoded[AUTOREGRESSIVE.id]
    baseline = Timing.of(AUTOREGRESSIVE, seconds[AUTOREGRESSIVE.id], alone)
    timings = [
        Timing.of(each, seconds[each.id], decoded[each.id], (baseline, alone))
        for each in finalists[1:]
    ]
    timings[0].differing_outputs, timings[1].tied_with_champion = 1, True
    result = SweepResult(
        name="tiny",
        started=datetime.now(UTC),
        pair=tiny_pair.spec,
        prompts=PROMPTS,
        max_new_tokens=NEW_TOKENS,
        profile=profile,
        trials=trials,
        oracles=[OraclePoint(draft="draft", verification_rate=0.1, speedup=3.0)],
        autoregressive=baseline,
        timings=timings,
        champion=timings[0].config_id,
        environment={"python": platform.python_version()},
    )
    rounds = [rounds_frame(each, config_id=config_id) for config_id, each in decoded.items()]
    pd.concat(rounds, ignore_index=True).to_parquet(folder / "rounds.parquet")
    result.save(folder)
    return result, folder


@pytest.fixture
def folder(swept, tmp_path):
    """A copy of its folder that may be changed."""
    return Path(shutil.copytree(swept[1], tmp_path / "another"))


@pytest.fixture
def result(swept):
    """A copy of the result that may be changed."""
    return swept[0].model_copy(deep=True)


@pytest.fixture(scope="session")
def under_load(swept, tiny_pair, tmp_path_factory):
    """The sweep's result with a choice for 1 and 8 clients: with 8 nobody drafts."""
    folder, workload = tmp_path_factory.mktemp("load"), Workload(clients=(1, 8), requests=8)
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


@pytest.fixture(scope="session")
def with_heads(swept, tiny_pair, tmp_path_factory):
    """The sweep's result with configurations of untrained acceptance heads, D × w_rej × h."""
    result = swept[0].model_copy(deep=True)
    root = tmp_path_factory.mktemp("heads")
    bins = [
        ReliabilityBin(low=p, high=p + 0.1, count=5, predicted=p, accepted=p) for p in (0.2, 0.7)
    ]
    for depth, w_rej in product((0, 1), (1.0, 6.0)):
        folder = root / f"specdecpp-d{depth}-w{w_rej:g}"
        metrics = {"train_kl": 0.3 + depth, "eval_kl": 0.4 + w_rej, "auc": 0.7}
        card = {"depth": depth, "w_rej": w_rej, "metrics": metrics, "reliability": bins}
        save_random_head(tiny_pair, "specdecpp", folder, **card)
        for threshold in (0.3, 0.7):
            policy = SpecDecPlusPlusSettings(head=str(folder), threshold=threshold)
            configuration = Configuration(drafter=DraftModelSettings(draft="draft", policy=policy))
            trial = result.trials[3]
            faster = {"estimated_speedup": 0.5 + threshold / 10 + depth / 10}
            update = {"configuration": configuration, "metrics": trial.metrics | faster}
            result.trials.append(trial.model_copy(update=update))
    return result
