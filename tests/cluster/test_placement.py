"""Where targets and drafts run, also a target that fits on no device as a whole."""

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray._private.state import actors
from ray.runtime_env import RuntimeEnvConfig

from cluster.devices import claim_device
from cluster.placed_engine import loaded_pair
from cluster.placement import Placement, place, release
from cluster.recording import run_recording
from cluster.session import QUIET, start_actor
from cluster.sharded_target.shard import Shard
from cluster.sharded_target.target_group import START_LIMIT
from cluster.sweep.measuring import open_measuring
from cluster.sweep.run import run_sweep
from research.papers.plan import PaperPlan
from research.papers.run import run_papers
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import PairSpec
from specdec_core.engine import Engine, Request
from specdec_core.engine.turns import requests_of
from specdec_core.evidence.bench.benchmark import BenchPlan, run_bench
from specdec_core.evidence.certificate.certify import FLOAT32, Extent, check_all
from specdec_core.models.pair import load_pair
from specdec_core.models.runner import CacheLost
from specdec_core.recordings.plan import RecordingPlan
from specdec_core.recordings.replay import Replay
from specdec_core.search.plan import Plan
from specdec_core.tokens.statistics import Counts
from tests.cluster import small_devices
from tests.cluster.clusters import in_a_process, process_of
from tests.commands import QUICK, ROOT, prompts_file, wait_until
from tests.configurations import FOUR
from tests.specdec_core.kinds import chain

FILES = sorted((Path(__file__).parents[2] / "cluster").glob("*-[0-9]*.yaml"))


@ray.remote
class Pinned:
    """An actor that claims its device and says on which cores its threads may run."""

    def __init__(self):
        self.device = claim_device()

    def cores(self):
        threads = Path("/proc/self/task").iterdir()
        return {core for thread in threads for core in os.sched_getaffinity(int(thread.name))}


def placement(draft=1, target=1, **more):
    value = {"draft": {"devices": draft}, "target": {"devices": target}, **more}
    return Placement.model_validate(value)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shipped_placements_are_read(file):
    assert Placement.load(file).target.devices >= 1


def test_no_two_actors_have_a_core_in_common(ray_running):
    placed = place(placement())
    try:
        options = placed.options("draft"), placed.options("target", 0)
        actors = [Pinned.options(**own).remote() for own in options]
        draft, target = ray.get([actor.cores.remote() for actor in actors])
        assert len(draft) == len(target) == 1
        assert draft != target
        assert placed.cores() == {ray.get_runtime_context().get_node_id(): 2}
    finally:
        placed.remove()


def test_a_model_on_a_core_has_one_thread(ray_running, tiny_spec):
    """Several would take turns on it."""
    spec = tiny_spec.with_runner(threads=2)

    def threads(actor):
        return torch.get_num_threads()

    placed = place(placement(draft=0))
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


def test_gpus_that_came_and_are_gone_again_are_waited_for(ray_running, monkeypatch):
    """As where the autoscaler removed their node; it may add another."""
    monkeypatch.setattr("cluster.placement.comes", lambda cores, gpus: True)
    monkeypatch.setattr("cluster.placement.autoscaled", lambda: True)
    with pytest.raises(UserError, match=r"0 were free within .*, and its autoscaler adds none"):
        place(placement(draft=0), wait=0.2)


def test_devices_that_stay_busy_are_an_error_not_a_hang(ray_running):
    has = int(ray.cluster_resources()["CPU"])
    placed = place(placement(draft=0, target=has))
    try:
        with pytest.raises(UserError, match=r"only 0 were free within 0\.4 s"):
            place(placement(), wait=0.4)
    finally:
        placed.remove()
    place(placement(draft=0, target=has)).remove()  # and nothing of the failed one is left behind


@ray.remote(num_cpus=0, max_restarts=1, max_task_retries=-1)
class Reserving:
    def reserve(self, devices):
        self.placed = place(placement(draft=0, target=devices))
        return ray.get_runtime_context().get_actor_id(), os.getpid()


def test_an_actor_that_ray_starts_again_gets_its_devices_back(ray_running):
    has = int(ray.cluster_resources()["CPU"])
    actor = Reserving.remote()
    name, before = ray.get(actor.reserve.remote(has))
    os.kill(before, signal.SIGKILL)
    assert ray.get(actor.reserve.remote(has))[1] != before
    ray.kill(actor)
    release(name)
    place(placement(draft=0, target=has)).remove()


@ray.remote(num_cpus=0)
class Owning:
    def reserve(self, devices):
        self.actor = Reserving.options(max_restarts=-1).remote()
        return ray.get(self.actor.reserve.remote(devices))[0], os.getpid()


def lose_devices(devices):
    """They are reserved by an actor that dies with its owner."""
    owner = Owning.remote()
    name, process = ray.get(owner.reserve.remote(devices))
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: actors(name)["State"] == "DEAD")


def test_devices_of_an_actor_that_died_with_its_owner_are_free_again(ray_running):
    has = int(ray.cluster_resources()["CPU"])
    lose_devices(has)
    place(placement(draft=0, target=has)).remove()


def lose_devices_of_a_job(address, devices):
    """In a driver with a namespace of its own, which stays connected."""
    ray.init(address, log_to_driver=False, logging_level="ERROR")
    lose_devices(devices)


def test_devices_that_an_actor_of_another_job_has_lost_are_free_again(ray_running):
    has = int(ray.cluster_resources()["CPU"])
    address = ray.get_runtime_context().gcs_address
    with ProcessPoolExecutor(1, get_context("spawn")) as job:
        job.submit(lose_devices_of_a_job, address, has).result()
        place(placement(draft=0, target=has)).remove()


def test_processes_may_take_as_long_to_start_as_their_runtime_environment():
    assert RuntimeEnvConfig()["setup_timeout_seconds"] < START_LIMIT


def processes(measuring):
    """The one that measures, and those of the models that its engine has run."""
    pair = measuring.pair
    assert "actor" in vars(pair.draft)
    return [os.getpid(), *map(process_of, [*pair.group._shards, pair.draft.actor])]


def test_finalists_are_timed_with_the_draft_on_its_own_device(ray_running, tiny_pair):
    prompt = tuple(tiny_pair.tokenizer("def main():")["input_ids"])
    request = Request("a", prompt, TOKENS)
    [expected] = Engine(tiny_pair, FOUR).generate([request])
    with open_measuring(tiny_pair.spec, placement(), gpus=0) as (measuring, placed):
        assert placed is not None
        assert placed.cores().total() == 2
        measuring.prepare([FOUR], request)
        _, generation = measuring.decode(FOUR, request)
        assert generation.tokens == expected.tokens
        assert generation.counts == expected.counts
        *_, draft = running = measuring.__ray_call__(processes)
        assert len({*running}) == 3
        os.kill(draft, signal.SIGKILL)
        with pytest.raises(CacheLost):  # it decodes the same, in another time
            measuring.decode(FOUR, request)
        _, generation = measuring.decode(FOUR, request)
        assert generation.counts == expected.counts
    place(placement()).remove()  # the devices are free again


TOKENS = 16
SEARCH = [{"drafter": chain(max_tokens=[2, 4])}, {"drafter": {"kind": "suffix"}}]
TABLE = {
    "title": "Methods",
    "paper": "Paper, Table 1",
    "prompts": ["here"],
    "columns": ["mat", "speedup"],
    "rows": [{"name": "autoregressive"}, {"name": "lookup", **SEARCH[1]}],
}
EXTENT = Extent(max_new_tokens=TOKENS, texts=1, timed=1, repeats=1)


def run_stages(spec: PairSpec, placed: Placement, prompts: Path, home: Path) -> None:
    """In a separate process, whose Ray has small devices where the target is split."""
    # Workers import tests.
    environment: dict[str, Any] = {"env_vars": {**QUIET, "PYTHONPATH": str(ROOT)}}
    small = placed.target.devices > 1
    if small:
        environment["worker_process_setup_hook"] = "tests.cluster.small_devices.install"
    ray.init(address="local", num_cpus=3, include_dashboard=False, runtime_env=environment)
    whole = load_pair(spec)  # here it fits
    texts = {"source": str(prompts)}
    values = {"pair": spec.model_dump(), "max_new_tokens": TOKENS}
    sweep = {**QUICK, "prompts": texts, "search": SEARCH, "cluster": placed, "replay": False}
    plan = Plan.model_validate(values | sweep).resolve()
    result, _ = run_sweep(plan, home)
    assert len(result.trials) == 4  # with autoregressive decoding
    assert result.champion is not None
    loaded = plan.prompts.load(whole.tokenizer, 0)
    requests = requests_of(loaded, whole, TOKENS, 0, Engine(whole))
    for trial in result.trials:
        expected = Counts.of(Engine(whole, trial.configuration).generate(requests))
        assert Counts(**trial.counts) == expected, trial.configuration.label
    recorded = RecordingPlan.model_validate(values | {"prompts": texts})
    replay = Replay(run_recording(recorded, home, placement=placed))
    for trial in result.trials:
        if replay.can(trial.configuration):
            assert replay.run(trial.configuration).counts == Counts(**trial.counts)
    papers = {"prompts": {"here": texts}, "tables": {"methods": TABLE}, "cluster": placed}
    tables, _ = run_papers(PaperPlan.model_validate(values | papers | {"repeats": 1}), home)
    for measured in tables.measured:
        expected = Counts.of(Engine(whole, measured.configuration).generate(requests))
        assert Counts(**measured.counts) == expected, measured.configuration.label

    greedy = check_all(whole, FOUR, loaded, EXTENT, Observer()).greedy
    plan = BenchPlan(pair=spec, chosen=(FOUR,), repeats=1, max_new_tokens=TOKENS)
    alone = run_bench(plan, loaded, whole, (), "whole", "bench")
    if small:
        small_devices.install()  # the engine is here, and the target does not fit
    narrow = spec.with_runner(**dict.fromkeys(FLOAT32, "bfloat16"))
    with loaded_pair(narrow, placed, [FOUR]) as pair:
        checks = check_all(pair, FOUR, loaded, EXTENT, Observer())
        assert checks.speed.target_dtype == "bfloat16"
        assert checks.greedy == greedy
        assert checks.sampled.passed
        assert pair.spec.runner.target_dtype == "float32"  # the checks of outputs need it
        split = run_bench(plan, loaded, pair, (), "split", "bench")
    for row, other in zip(split.rows, alone.rows, strict=True):
        assert [t.outputs for t in row.takes[0]] == [t.outputs for t in other.takes[0]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("draft", "target"),
    [
        (1, {"devices": 1}),
        (0, {"devices": 2, "split": "heads"}),
        (1, {"devices": 2, "split": "layers"}),
    ],
    ids=["draft apart", "heads", "layers and draft apart"],
)
def test_every_stage_decodes_on_a_placement_as_in_one_process(tiny_spec, tmp_path, draft, target):
    placed = Placement.model_validate({"draft": {"devices": draft}, "target": target})
    prompts = prompts_file(tmp_path, ["def main():", "import os"])
    in_a_process(run_stages, tiny_spec, placed, prompts, tmp_path / "home")
