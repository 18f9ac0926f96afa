"""A model runs on the GPU that was reserved for it, and GPUs that are not there yet are waited for.
The nodes are simulated, and so are the GPUs."""

import json
import os
import re
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from cluster import autoscaling
from cluster.placed_engine import placed_engine
from cluster.placement import Placement, place
from cluster.session import QUIET, ray_session, resources
from specdec_core.base.errors import UserError
from specdec_core.engine import Request
from specdec_core.engine.scheduler import Limits
from specdec_core.servers.process import free_port
from tests.cluster import fake_gpus
from tests.configurations import PEARL, drafting

HEAD_ID = "f" * 56


def started(head):
    return Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **head})


def in_a_process(function):
    """A driver of its own, as other tests' Ray may run in this one."""
    with ProcessPoolExecutor(1, get_context("spawn")) as driver:
        driver.submit(function).result()


@pytest.fixture
def quiet(monkeypatch):
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def four_gpus(quiet):
    """The address of a cluster with four GPUs, and CPU cores beside three of them."""
    cluster = started({"num_cpus": 3, "num_gpus": 4})
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


def decode(address, spec, notes):
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
    in_a_process(partial(decode, four_gpus, tiny_spec, tmp_path / "notes"))


@pytest.fixture
def growing(quiet, tmp_path, monkeypatch):
    """The address of a cluster of one core whose autoscaler may add two nodes of two GPUs."""
    address = f"{ray.util.get_node_ip_address()}:{(port := free_port())}"
    nodes = {
        "head": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
        "gpu": {"resources": {"CPU": 2, "GPU": 2}, "node_config": {}, "max_workers": 2},
    }
    provider = {"type": "fake_multinode", "gcs_address": address, "use_node_id_as_ip": True}
    commands = ["setup_commands", "initialization_commands", "rsync_exclude", "rsync_filter"]
    commands += [f"{kind}_start_ray_commands" for kind in ("head", "worker")]
    commands += [f"{kind}_setup_commands" for kind in ("head", "worker")]
    config: dict[str, Any] = {
        "cluster_name": "growing",
        "provider": provider,
        "available_node_types": nodes,
        "head_node_type": "head",
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
    monkeypatch.setenv("RAY_OVERRIDE_NODE_ID_FOR_TESTING", HEAD_ID)
    head = {"num_cpus": 1, "gcs_server_port": port}
    cluster = started({**head, "autoscaling_config": str(tmp_path / "cluster.json")})
    monkeypatch.delenv("RAY_OVERRIDE_NODE_ID_FOR_TESTING")
    try:
        yield cluster.address
    finally:
        cluster.shutdown()
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
    in_a_process(partial(grow, growing))
