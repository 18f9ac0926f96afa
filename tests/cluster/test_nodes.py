"""Targets on GPUs and nodes, and drafts on others or in actors, decode as in one process."""

import json
import os
import re
import signal
from threading import Thread
from typing import Any

import psutil
import pytest
import ray
from ray import tune
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
)

from cluster import autoscaling
from cluster.draft_actor import Draft, PlacedDraft
from cluster.placed_engine import placed_engine
from cluster.placement import Placement, place
from cluster.session import QUIET, ray_session, resources
from cluster.sweep.run import run_sweep
from cluster.sweep.trial import CountTrial, TrialTask, group
from dashboards.reports.sweep import caveats
from specdec_core.base.errors import UserError
from specdec_core.config import Sampling
from specdec_core.cost import Profile
from specdec_core.drafting.pearl.link import SocketLink
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.models.pair import load_pair
from specdec_core.models.runner import CacheLost
from specdec_core.search.results import SECONDS
from specdec_core.servers.process import free_port
from specdec_core.tokens.statistics import TokenOrigin
from tests.cluster import fake_gpus
from tests.cluster.clusters import in_a_process, node_of, process_of, running_cluster
from tests.commands import QUICK, ROOT, alive, prompts_file, sweep_plan, wait_until
from tests.configurations import PEARL, drafting
from tests.specdec_core.drafting.pearl.in_turns import linked


@pytest.fixture
def quiet(monkeypatch):
    for name, value in {**QUIET, "PYTHONPATH": str(ROOT)}.items():  # workers import tests
        monkeypatch.setenv(name, value)


@pytest.fixture
def three_nodes(quiet):
    """The address of a cluster with three nodes of one core each."""
    with running_cluster(2, num_cpus=1) as cluster:
        yield cluster.address


def decode(address, spec):
    os.environ["RAY_ADDRESS"] = address
    whole = load_pair(spec)
    request = Request("a", tuple(whole.tokenizer("def main():")["input_ids"]), 200)
    [expected] = Engine(whole).generate([request])
    placement = Placement.model_validate({"target": {"devices": 2, "split": "heads"}})
    with ray_session(), placed_engine(spec, PEARL, Limits(1), placement) as engine:
        group = engine.pair.group
        assert len({node_of(shard) for shard in group._shards}) == 2
        origins: list[TokenOrigin] = []
        while TokenOrigin.DRAFT not in origins:  # a draft that has come needs a moment
            [generation] = engine.generate([request])
            assert generation.tokens == expected.tokens
            origins = generation.origins

        engine.add(request)
        for _ in range(5):
            engine.step()
        os.kill(process_of(group._shards[1]), signal.SIGKILL)
        chunks = []
        while not engine.idle:
            chunks += engine.step()  # none in the step that notices the loss
        assert chunks[-1].finished.tokens == expected.tokens
        assert group.rebuilt == 1

        sampled = Request("b", request.tokens, 100, Sampling(temperature=1.0), ignore_eos=True)
        [generation] = engine.generate([sampled])
        assert len(generation.tokens) == 100


@pytest.mark.long
def test_a_target_on_two_nodes_with_its_draft_on_a_third_loses_nothing_with_a_shard(
    three_nodes, tiny_spec
):
    in_a_process(decode, three_nodes, tiny_spec)


@pytest.fixture
def four_gpus(quiet):
    """The address of a cluster with four GPUs, and CPU cores beside three of them."""
    with running_cluster(num_cpus=3, num_gpus=4) as cluster:
        yield cluster.address


def decode_on_gpus(address, spec, notes):
    os.environ[fake_gpus.NOTES] = str(notes)
    fake_gpus.install()
    environment = {
        "worker_process_setup_hook": "tests.cluster.fake_gpus.install",
        "env_vars": {fake_gpus.NOTES: str(notes)},
    }
    ray.init(address=address, runtime_env=environment, log_to_driver=False, logging_level="ERROR")
    with pytest.raises(UserError, match=r"4 GPUs needed .* has 3 GPUs on one node, counting those"):
        place(Placement.model_validate({"target": {"devices": 3}}))
    for configuration, sees in [(PEARL, False), (drafting("draft_model"), True)]:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,3" if sees else ""
        with placed_engine(spec, configuration, Limits(1), Placement()) as engine:
            prompt = tuple(engine.pair.tokenizer("def main():")["input_ids"])
            [generation] = engine.generate([Request("a", prompt, 8)])
            assert len(generation.tokens) == 8
        by_process = fake_gpus.touched(notes)
        assert os.getpid() not in by_process, "this process has reserved no GPU"
        assert len(by_process) == 2, "draft and target"
        assert sorted(map(len, by_process.values())) == [1, 1], "each sees its own alone"
        assert len({*by_process.values()}) == 2


@pytest.mark.long
def test_every_model_runs_on_the_gpu_that_was_reserved_for_it(four_gpus, tiny_spec, tmp_path):
    in_a_process(decode_on_gpus, four_gpus, tiny_spec, tmp_path / "notes")


@pytest.fixture
def growing(quiet, tmp_path, monkeypatch):
    """The address of a cluster of one core whose autoscaler may add two nodes of two GPUs."""
    address = f"{ray.util.get_node_ip_address()}:{(port := free_port())}"
    nodes = {
        FAKE_HEAD_NODE_TYPE: {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
        "gpu": {"resources": {"CPU": 2, "GPU": 2}, "node_config": {}, "max_workers": 2},
    }
    provider = {
        "type": "fake_multinode",
        "gcs_address": address,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,  # which end nodes that SSH does not reach
        "disable_launch_config_check": True,
    }
    commands = ["setup_commands", "initialization_commands", "rsync_exclude", "rsync_filter"]
    commands += [f"{kind}_start_ray_commands" for kind in ("head", "worker")]
    commands += [f"{kind}_setup_commands" for kind in ("head", "worker")]
    config: dict[str, Any] = {
        "cluster_name": "growing",
        "provider": provider,
        "available_node_types": nodes,
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "max_workers": 2,
        "upscaling_speed": 10,
        "idle_timeout_minutes": 60,
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        **{name: [] for name in commands},
    }
    (tmp_path / "cluster.json").write_text(json.dumps(config))
    monkeypatch.setenv("RAY_FAKE_CLUSTER", "1")
    monkeypatch.setenv("AUTOSCALER_UPDATE_INTERVAL_S", "1")
    monkeypatch.setenv("RAY_OVERRIDE_NODE_ID_FOR_TESTING", FAKE_HEAD_NODE_ID)
    head = {"gcs_server_port": port, "autoscaling_config": str(tmp_path / "cluster.json")}
    with running_cluster(num_cpus=1, **head) as cluster:
        monkeypatch.delenv("RAY_OVERRIDE_NODE_ID_FOR_TESTING")
        yield cluster.address
    for process in psutil.process_iter(["cmdline"]):  # the nodes that the autoscaler added
        if any(re.search(rf"{address}\b", word) for word in process.info["cmdline"] or ()):
            process.kill()


def grow(address):
    os.environ["RAY_ADDRESS"] = address
    autoscaling.ANSWER = 8.0
    with ray_session():
        assert resources(1, "auto") == {"CPU": 1, "GPU": 1}
        placed = place(Placement.model_validate({"target": {"devices": 2}}))
        assert placed.kind == "GPU"
        assert len({node["NodeID"] for node in ray.nodes()}) == 3
        placed.remove()
        with pytest.raises(UserError, match=r"9 GPUs needed .* and its autoscaler adds none"):
            place(Placement.model_validate({"target": {"devices": 8}}), wait=1)


@pytest.mark.long
def test_gpus_that_the_autoscaler_adds_are_waited_for_and_others_are_refused(growing):
    in_a_process(grow, growing)


def test_a_killed_draft_costs_no_token_and_comes_back(ray_running, tiny_pair):
    placed = place(Placement.model_validate({"target": {"devices": 1}}))
    draft = PlacedDraft(placed, tiny_pair.spec)
    try:
        link = draft.link()
        request = Request("a", tuple(tiny_pair.tokenizer("def main():")["input_ids"]), 240)
        [expected] = Engine(tiny_pair).generate([request])
        engine = Engine(linked(tiny_pair, link), PEARL)
        engine.add(request)
        killed, finished = False, None
        assert engine.drafter.prepare(60)
        while finished is None:
            (chunk,) = engine.step()
            finished = chunk.finished
            if TokenOrigin.DRAFT in chunk.origins and not killed:
                os.kill(process_of(draft.actor), signal.SIGKILL)
                killed = True
        assert killed
        assert finished.tokens == expected.tokens
        assert TokenOrigin.DRAFT in finished.origins
        assert engine.drafter.prepare(60)  # Ray has brought it back
        [again] = engine.generate([request])
        assert again.tokens == expected.tokens
        assert TokenOrigin.DRAFT in again.origins
        assert link.number == 2
    finally:
        draft.close()
        placed.remove()


def test_a_draft_killed_on_its_device_costs_a_synchronous_drafter_no_token(ray_running, tiny_pair):
    request = Request("a", tuple(tiny_pair.tokenizer("def main():")["input_ids"]), 64)
    [expected] = Engine(tiny_pair).generate([request])
    placement = Placement()
    with placed_engine(tiny_pair.spec, drafting("draft_model"), Limits(1), placement) as engine:
        engine.add(request)
        for _ in range(3):
            [chunk] = engine.step()
        draft, target = engine.pair.draft, engine.pair.group
        assert {TokenOrigin.DRAFT} <= {*chunk.origins}
        assert process_of(draft.actor) != process_of(target._shards[0])
        os.kill(process_of(draft.actor), signal.SIGKILL)
        origins = []
        while not engine.idle:
            for chunk in engine.step():
                origins += chunk.origins
        assert chunk.finished.tokens == expected.tokens
        assert TokenOrigin.DRAFT in origins
        assert (draft.group.rebuilt, target.rebuilt) == (1, 0)


def test_a_draft_whose_connection_is_cut_comes_back_and_ends_with_its_engine(tiny_pair):
    draft, link = object.__new__(Draft), SocketLink("127.0.0.1")
    draft.drafts = tiny_pair
    address = ("127.0.0.1", link.port, link.key)
    serving = Thread(target=draft.draft_for, args=address, daemon=True)
    serving.start()
    try:
        assert link.wait(30)
        link._lose()  # as an engine does that takes it for lost
        assert link.wait(30)
        assert link.number == 2
    finally:
        link.close()
    serving.join(30)
    assert not serving.is_alive()


TOKENS = 16
CASCADE = {"kind": "cascade"}
FAR = {"device": "far away", "target": 0.1, "drafts": {"*": 0.001}}
SWEEP = QUICK | {
    "max_new_tokens": TOKENS,
    "finalists": 4,
    "search": [
        {"drafter": {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": 2}}},
        {"drafter": {"kind": "pearl", "drafter": {"kind": "draft_model"}, "wait": [0, None]}},
        {"drafter": {"kind": "hybrid", "otherwise": {"kind": "pearl", "drafter": CASCADE}}},
    ],
}


@pytest.mark.long
def test_a_sweep_times_pearl_on_its_devices(ray_running, tiny_pair, tmp_path):
    prompts = prompts_file(tmp_path, ["def main():"])
    plan = sweep_plan(tiny_pair.spec, prompts, **SWEEP, cluster=Placement())
    result, _ = run_sweep(plan, tmp_path)
    timed = {result.trial(t.config_id).configuration: t for t in result.timings}
    assert sum(configuration.asynchronous for configuration in timed) == 3
    assert len(timed) == 4
    assert all(timing.differing_outputs == 0 for timing in timed.values())
    assert len(result.trials) == 5


@pytest.fixture
def trial(ray_running, tiny_pair):
    """A trial that counts PEARL on its devices."""
    slow = Profile.model_validate({**FAR, "target": 100.0}).of(tiny_pair.spec.drafts)
    request = Request("a", tuple(tiny_pair.tokenizer("def main():")["input_ids"]), TOKENS)
    task = TrialTask(tiny_pair.spec, slow, (request,), 1, placement=Placement())
    trial = tune.with_parameters(CountTrial, task=task)({"configurations": group([PEARL])})
    yield trial
    trial.stop()


def test_a_trial_counts_pearl_on_its_devices(trial):
    [found] = trial.train()["counted"].trials
    assert found.counts["n"] == TOKENS
    assert found.counts["n_drafted"]
    assert found.metrics[SECONDS] < 100  # what it took, and not what the profile says


def test_a_trial_is_lost_with_its_draft_so_that_rounds_without_one_do_not_count(trial, monkeypatch):
    engine, killed = trial.engine, []
    step = engine.step

    def killing(texts=True):
        if not killed:
            killed.append(process_of(engine.pair.draft.actor))
            os.kill(killed[0], signal.SIGKILL)
            wait_until(lambda: not alive(killed[0]))
        return step(texts)

    monkeypatch.setattr(engine, "step", killing)
    with pytest.raises(CacheLost):
        trial.train()


@pytest.mark.long
def test_optuna_searches_windows_of_pearl_on_its_devices(ray_running, tiny_pair, tmp_path):
    prompts = prompts_file(tmp_path, ["def main():"])
    windows = {"kind": "pearl", "window": {"randint": [2, 8]}, "wait": 2}
    changes = {
        "search": [{"drafter": windows}],
        "method": "optuna",
        "trials": 3,
        "finalists": 1,
        "race": {"seconds": 0, "further": 0, "challengers": 0},
    }
    plan = sweep_plan(tiny_pair.spec, prompts, **SWEEP | changes, cluster=Placement())
    result, _ = run_sweep(plan, tmp_path)
    searched = [trial for trial in result.trials if trial.configuration.asynchronous]
    assert len(searched) > 1
    assert all(trial.counts["n_drafted"] for trial in searched)  # each had its draft
    assert all(trial.counts["n"] == TOKENS for trial in searched)
    assert any("depends on timing" in caveat for caveat in caveats(result))
