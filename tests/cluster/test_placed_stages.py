"""A target that fits on no device as a whole is recorded and swept on the devices that share it."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import ray

from cluster.placement import Placement
from cluster.recording import run_recording
from cluster.session import QUIET
from cluster.sweep.run import run_sweep
from specdec_core.config import PairSpec
from specdec_core.engine import Engine
from specdec_core.engine.turns import requests_of
from specdec_core.models.pair import load_pair
from specdec_core.recordings.plan import RecordingPlan
from specdec_core.recordings.replay import Replay
from specdec_core.search.plan import Plan
from specdec_core.tokens.statistics import Counts
from tests.commands import QUICK, prompts_file

SPLIT = Placement.model_validate({"draft": {"devices": 0}, "target": {"devices": 2}})
TOKENS = 16
SEARCH = [
    {"drafter": {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": [2, 4]}}},
    {"drafter": {"kind": "suffix"}},
]


def run_stages(spec: PairSpec, prompts: Path, home: Path) -> None:
    """A driver of its own, whose Ray has small devices."""
    hook = "tests.cluster.small_devices.install"
    environment = {"worker_process_setup_hook": hook, "env_vars": QUIET}
    ray.init(address="local", num_cpus=2, include_dashboard=False, runtime_env=environment)
    whole = load_pair(spec)  # here it fits
    values = {
        **QUICK,
        "pair": spec.model_dump(),
        "prompts": {"source": str(prompts)},
        "max_new_tokens": TOKENS,
        "search": SEARCH,
        "cluster": SPLIT,
    }
    plan = Plan.model_validate({**values, "replay": False}).resolve()
    result, _ = run_sweep(plan, home)
    assert len(result.trials) == 4  # with autoregressive decoding
    assert result.champion is not None
    loaded = plan.prompts.load(whole.tokenizer, 0)
    requests = requests_of(loaded, whole, TOKENS, 0, Engine(whole))
    for trial in result.trials:
        expected = Counts.of(Engine(whole, trial.configuration).generate(requests))
        assert Counts(**trial.counts) == expected, trial.configuration.label
    recording = run_recording(
        RecordingPlan.model_validate(
            {key: values[key] for key in ("pair", "prompts", "max_new_tokens")}
        ),
        home,
        placement=SPLIT,
    )
    replay = Replay(recording)
    for trial in result.trials:
        if replay.can(trial.configuration):
            assert replay.run(trial.configuration).counts == Counts(**trial.counts)


@pytest.mark.long
def test_a_target_that_is_split_is_recorded_and_swept_on_its_devices(tiny_spec, tmp_path):
    prompts = prompts_file(tmp_path, ["def main():", "import os"])
    with ProcessPoolExecutor(1, get_context("spawn")) as driver:
        driver.submit(run_stages, tiny_spec, prompts, tmp_path / "home").result()
