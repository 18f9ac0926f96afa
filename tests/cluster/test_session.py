"""What a process asks of the cluster is what one of its nodes has; a cluster that is not there is
said to be missing."""

import json
import os
import signal
import socket
import sys

import pytest
import ray
from ray.tune.tune import _setup_signal_catching

from cluster import session
from cluster.session import get, ray_session, resources, start_actor, user_error
from jobs.console import run
from specdec_core.base.errors import UserError
from specdec_core.servers.process import free_port


@pytest.fixture
def mixed(monkeypatch):
    """A cluster with a large node without a GPU, and a small one with one."""
    nodes = [{"CPU": 64.0}, {"CPU": 8.0, "GPU": 1.0}]
    listed = [{"Alive": True, "Resources": each} for each in nodes]
    listed.append({"Alive": False, "Resources": {"CPU": 96.0, "GPU": 8.0}})
    monkeypatch.setattr(ray, "nodes", lambda: listed)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 72.0, "GPU": 1.0})
    monkeypatch.setattr(session, "comes", lambda cores, gpus=0: False)


@pytest.mark.usefixtures("mixed")
def test_threads_beside_a_gpu_are_those_of_a_node_that_has_one():
    assert resources(8, "auto") == {"CPU": 8, "GPU": 1}
    with pytest.raises(UserError, match="16 asked for, the cluster's nodes with a GPU have 8"):
        resources(16, "auto")
    assert resources(16, "cpu") == {"CPU": 16, "GPU": 0}
    assert resources(8, "cuda") == {"CPU": 8, "GPU": 1}
    with pytest.raises(UserError, match="65 asked for, the cluster's nodes have 64"):
        resources(65, "cpu")


@pytest.mark.usefixtures("mixed")
def test_a_gpu_is_chosen_by_ray_alone():
    with pytest.raises(
        UserError, match=r"^runner.device: cuda:1, but Ray chooses the GPU: .*cuda$"
    ):
        resources(8, "cuda:1")


@pytest.mark.usefixtures("mixed")
def test_the_only_gpu_that_a_process_sees_may_be_named():
    """As in older recordings, sweeps and champions."""
    assert resources(8, "cuda:0") == {"CPU": 8, "GPU": 1}


@pytest.mark.usefixtures("mixed")
def test_cores_that_an_autoscaler_adds_are_asked_for(monkeypatch):
    """It may have removed all nodes but the head, which runs nothing."""
    monkeypatch.setattr(session, "comes", lambda cores, gpus=0: (cores, gpus) == (65, 0))
    assert resources(65, "cpu") == {"CPU": 65, "GPU": 0}


def test_workers_on_other_nodes_get_what_connects_devices_and_opens_models(monkeypatch):
    kept = {
        "NCCL_IB_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "SPECDEC_KINDS": "own_kinds",
        "SPECDEC_VLLM": "/opt/vllm",
    }
    given = {**kept, "HF_TOKEN": "a", "OTHER": "b"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    job = {"runtime_env": {"env_vars": {"HF_TOKEN": "the job's"}}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    variables = session._inherited_variables()
    assert {*kept, session.HIDE_GPUS} <= variables.keys()
    assert not {"HF_TOKEN", "OTHER"} & variables.keys()


@pytest.fixture(scope="module")
def silent():
    """The port of a socket that takes connections and never answers."""
    with socket.create_server(("", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:{free}", "connection refused"),
        ("ray://127.0.0.1:{free}", "connection refused"),
        ("127.0.0.1:{silent}", "does not answer as Ray does"),
        ("ray://127.0.0.1:{silent}", "does not answer as Ray does"),
        ("no-such-host.invalid:6379", "name or service not known|name resolution"),
        ("ray://no-such-host.invalid:10001", "name or service not known|name resolution"),
        ("http://127.0.0.1:8265", "expected auto, <host>:<port> or ray://<host>:<port>"),
        ("head", "expected auto, <host>:<port> or ray://<host>:<port>"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_line_and_exit_code_2(
    address, reason, silent, capsys, monkeypatch
):
    address = address.format(free=free_port(), silent=silent)
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(session, "ANSWERING", 1.0)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # by another test

    def main() -> None:
        with ray_session():
            raise AssertionError("there is no cluster")

    monkeypatch.setattr(sys, "argv", ["job"])
    with pytest.raises(SystemExit) as exit:
        run(main)
    assert exit.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"no Ray cluster at {address} (RAY_ADDRESS): " in line
    assert any(each in line for each in reason.split("|"))


@pytest.mark.parametrize(
    ("usable", "quota", "cores"), [(8, 3.5, 3), (2, 96.0, 2), (8, 0.5, 1), (1, None, 1)]
)
def test_a_local_ray_has_the_cores_that_this_process_may_use(usable, quota, cores, monkeypatch):
    asked: dict[str, object] = {}
    for name in ("RAY_ADDRESS", "RAY_USE_MULTIPROCESSING_CPU_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ray._private.utils._get_docker_cpus", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # by another test
    monkeypatch.setattr(ray, "init", lambda **options: asked.update(options))
    monkeypatch.setattr(session, "_end_local", lambda: None)
    with ray_session():
        assert asked["num_cpus"] == cores


def test_a_sweep_leaves_ctrl_c_alone_in_a_process_that_is_connected_already(
    ray_running, monkeypatch
):
    monkeypatch.delenv("TUNE_DISABLE_SIGINT_HANDLER", raising=False)
    before = signal.getsignal(signal.SIGINT)
    try:
        with ray_session():
            _setup_signal_catching()  # of Tune, whenever it runs
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, before)


class Broken:
    """An actor whose model is not there."""

    def __init__(self):
        raise UserError("some/model: cannot load its weights: UserError: a file is damaged")

    def name(self):
        return ""


def test_bad_input_found_by_an_actor_that_starts_is_the_line_that_it_said(ray_running):
    actor = start_actor(Broken, num_cpus=0)
    with pytest.raises(UserError) as error:
        get(actor.name.remote())
    assert str(error.value) == "some/model: cannot load its weights: UserError: a file is damaged"


def test_the_line_of_another_error_is_not_taken_for_bad_input():
    where = "Traceback (most recent call last):\n  File 'x.py', line 1\n"
    assert user_error(f"{where}specdec_core.base.errors.UserError: no draft") == "no draft"
    assert user_error(f"{where}RuntimeError: UserError: no draft") is None
    assert user_error("") is None
