"""Where targets and drafts run, also a target that fits on no device as a whole."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import ray
import torch
from ray.runtime_env import RuntimeEnvConfig

from cluster.devices import claim_device
from cluster.placed_bench import placed_bench
from cluster.placement import Placement, place
from cluster.recording import run_recording
from cluster.session import QUIET, start_actor
from cluster.sharded_target.shard import Shard
from cluster.sharded_target.target_group import START_LIMIT
from cluster.sweep.run import run_sweep
from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec
from specdec_core.engine import Engine
from specdec_core.engine.turns import requests_of
from specdec_core.models.pair import load_pair
from specdec_core.recordings.plan import RecordingPlan
from specdec_core.recordings.replay import Replay
from specdec_core.search.plan import Plan
from specdec_core.tokens.statistics import Counts
from tests.commands import QUICK, prompts_file

FILES = sorted((Path(__file__).parents[2] / "cluster").glob("*-[0-9]*.yaml"))


@ray.remote
class Pinned:
    """An actor that claims its device and says on which cores its threads may run."""

    def __init__(self):
        self.device = claim_device()

    def cores(self):
        lines = [
            line
            for task in Path("/proc/self/task").iterdir()
            for line in (task / "status").read_text().splitlines()
        ]
        return {line.split()[1] for line in lines if line.startswith("Cpus_allowed_list")}


def placement(draft=1, target=1, **more):
    value = {"draft": {"devices": draft}, "target": {"devices": target}, **more}
    return Placement.model_validate(value)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shipped_placements_are_read(file):
    assert Placement.load(file).target.devices >= 1


def test_an_unknown_key_is_an_error_that_names_file_and_key(tmp_path):
    file = tmp_path / "placement.yaml"
    file.write_text("target: {devices: 2, spilt: heads}\n")
    with pytest.raises(UserError, match=r"placement\.yaml: target\.spilt"):
        Placement.load(file)


def test_no_two_actors_have_a_core_in_common(ray_running):
    placed = place(placement())
    try:
        actors = [
            Pinned.options(**placed.options("draft")).remote(),
            Pinned.options(**placed.options("target", 0)).remote(),
        ]
        draft, target = ray.get([actor.cores.remote() for actor in actors])
        assert len(draft) == len(target) == 1
        assert draft != target
        assert placed.cores() == {ray.get_runtime_context().get_node_id(): 2}
    finally:
        placed.remove()


def test_a_model_on_a_core_has_one_thread(ray_running, tiny_spec):
    """Several would take turns on it."""
    runner = tiny_spec.runner.model_copy(update={"threads": 2})
    spec = tiny_spec.model_copy(update={"runner": runner})

    def threads(actor):
        return torch.get_num_threads()

    alone = placement(draft=0)
    with placed_bench(spec, alone) as (bench, _):
        assert bench.spec().runner.threads == 1
        assert ray.get(bench.actor.__ray_call__.remote(threads)) == 1
    placed = place(alone)
    try:
        actor = start_actor(Shard, spec, "heads", 0, 1, **placed.options("target"))
        ray.get(actor.load.remote())
        assert ray.get(actor.__ray_call__.remote(threads)) == 1
        ray.kill(actor)
    finally:
        placed.remove()


def test_more_devices_than_the_cluster_has_are_refused_at_once(ray_running):
    has = int(ray.cluster_resources()["CPU"])
    with pytest.raises(UserError, match=rf"{has + 2} CPU cores needed .* has {has} CPU cores on"):
        place(placement(target=has + 1))
    with pytest.raises(UserError, match="device: gpu, but the cluster has none"):
        place(placement(device="gpu"))


def test_devices_that_stay_busy_are_an_error_not_a_hang(ray_running):
    has = int(ray.cluster_resources()["CPU"])
    placed = place(placement(draft=0, target=has))
    try:
        with pytest.raises(UserError, match=r"only 0 were free within 0\.4 s"):
            place(placement(), wait=0.4)
    finally:
        placed.remove()
    place(placement(draft=0, target=has)).remove()  # and nothing of the failed one is left behind


@pytest.mark.parametrize(
    ("runner", "devices", "message"),
    [
        ({}, 3, "cannot be split evenly among 3 devices"),
        ({"compile": True}, 2, "a target on several devices runs eagerly"),
    ],
    ids=["heads", "compiled"],
)
def test_a_sweep_with_a_split_that_cannot_be_is_refused_before_it_begins(
    tiny_spec, tmp_path, runner, devices, message
):
    pair = tiny_spec.model_dump()
    asked = {
        **QUICK,
        "search": [{"drafter": {"kind": "suffix"}}],
        "pair": {**pair, "runner": {**pair["runner"], **runner}},
        "prompts": {"source": str(prompts_file(tmp_path, ["def main():"]))},
        "cluster": placement(target=devices),
    }
    with pytest.raises(UserError, match=message):
        run_sweep(Plan.model_validate(asked).resolve(), tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_processes_may_take_as_long_to_start_as_their_runtime_environment():
    assert RuntimeEnvConfig()["setup_timeout_seconds"] < START_LIMIT


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
