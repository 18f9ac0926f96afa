"""Connecting to Ray: an existing cluster, or a quiet local one."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import ray
from ray._private.grpc_utils import init_grpc_channel
from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET
from ray._private.services import canonicalize_bootstrap_address
from ray._private.utils import get_num_cpus
from ray.core.generated import gcs_service_pb2, ray_client_pb2
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
from ray.core.generated.ray_client_pb2_grpc import RayletDriverStub
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.autoscaling import comes
from specdec_core.base.errors import UserError, os_reason
from specdec_core.base.workspace import present_path
from specdec_core.config import PairSpec

HIDE_GPUS = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"  # from workers that have reserved none

# Ray and Tune read these when they start, and a local cluster hands them to its workers.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # Tune's older console output, which verbose=0 silences altogether
    HIDE_GPUS: "1",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",  # finished work is in our folders
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # reported in one line, or tried again
    # Ctrl-C ends a sweep at once: finished work is on disk, Tune has nothing to save.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # models may be given as relative folders
    "RAY_worker_niceness": "0",  # else 15, and other processes would disturb the times
    "TOKENIZERS_PARALLELISM": "false",
}

# The start of the variables that workers on other nodes get from the driver.
INHERITED = (
    "SPECDEC_HOME",
    "SPECDEC_KINDS",
    "SPECDEC_VLLM",
    "HF_TOKEN",
    "HF_ENDPOINT",
    "NCCL_",
    "TORCH_NCCL_",
    "GLOO_",
)
ANSWERING = 10.0  # seconds that a cluster may take to answer


@contextmanager
def ray_session() -> Iterator[None]:
    """Connect to the cluster that `RAY_ADDRESS` names (set inside a Ray job), or else start a local
    one and stop it at the end. An existing connection is used and left open. The process keeps its
    handler of SIGTERM. Only this process stops a local Ray."""
    for name in ("ray.tune", "ray.train", "ray.data"):
        # Their errors are reported in one line where they are handled.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS") or "local"
    if local := address == "local":
        options: dict[str, Any] = {"num_cpus": _cores(), "include_dashboard": False}
    else:
        options = {"runtime_env": {"env_vars": _inherited_variables()}}
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    starting = _starting_local() if local else nullcontext()
    with warnings.catch_warnings(), starting, _own_handler():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            if not local:
                _probe(address)
            ray.init(address=address, **options, **quiet)
        except Exception as error:  # a start that takes too long raises no narrower one
            reason = " ".join(str(error).split())
            what = "Ray did not start"
            if not local:
                what = f"no Ray cluster at {address} (RAY_ADDRESS)"
            raise UserError(f"{what}: {reason}") from None
    try:
        yield
    finally:
        _end_local() if local else ray.shutdown()


def _cores() -> int:
    """The CPU cores that this process may use, by the limits of its container and its affinity."""
    cores = int(get_num_cpus(override_docker_cpu_warning=True))
    cores = min(cores, len(os.sched_getaffinity(0)))
    return max(cores, 1)  # a container may have a part of a core


def check_alive() -> None:
    """Raises :class:`UserError` where the local Ray's raylet or GCS server has ended."""
    node: Any = ray._private.worker._global_node
    for kind, process in () if node is None else node.dead_processes():
        if kind in (PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET):
            raise UserError(f"Ray's {kind} has ended (status {process.returncode})")


@contextmanager
def _starting_local() -> Iterator[None]:
    """Protects the start of a local Ray from signals.

    Ray's processes inherit the mask and so never get SIGTERM and SIGHUP, which a terminal sends to
    a whole group and systemd to all processes of a service. An interrupt of the main thread is
    delivered at the end of the block: Python drops an exception that is raised around a fork, and
    the lock of `logging` would stay taken.
    """
    main = threading.current_thread() is threading.main_thread()
    interrupts: list[int] = []
    if main:
        before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        if main:
            signal.signal(signal.SIGINT, before)
            if interrupts:
                signal.raise_signal(signal.SIGINT)


def _end_local() -> None:
    """Disconnect from the local Ray, and kill all of its processes. Ray would send SIGTERM, which
    they block, and wait a second for each; its agents outlive the raylet by seconds."""
    node: Any = ray._private.worker._global_node
    processes = () if node is None else [process for _, process in node.live_processes()]
    started: list[psutil.Process] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            started += psutil.Process(process.pid).children(recursive=True)
        process.terminate = process.kill
    ray.shutdown()
    for each in started:
        with suppress(psutil.NoSuchProcess):
            each.kill()


def _probe(address: str) -> None:
    """Raises an error with the reason where no Ray answers at `address` within :data:`ANSWERING`
    seconds. Ray itself would try forever, or for half a minute without a reason."""
    if not re.fullmatch(r"auto|(ray://)?[^/]+:\d+", address):
        raise ValueError("expected auto, <host>:<port> or ray://<host>:<port>")
    found = address.removeprefix("ray://")
    client = found != address
    if not client:
        found = str(canonicalize_bootstrap_address(found))  # the node's address for localhost, too
    host, _, port = found.rpartition(":")
    where = "" if address.endswith(found) else f"{found}: "
    channel = init_grpc_channel(found)
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWERING).close()
        if client:
            ping = ray_client_pb2.ClusterInfoRequest(type=ray_client_pb2.ClusterInfoType.PING)
            RayletDriverStub(channel).ClusterInfo(ping, timeout=ANSWERING)
        else:
            asked = gcs_service_pb2.CheckAliveRequest()
            NodeInfoGcsServiceStub(channel).CheckAlive(asked, timeout=ANSWERING)
    except OSError as error:  # a name that does not resolve, too
        raise ConnectionError(f"{where}{os_reason(error)}") from None
    except grpc.RpcError as error:
        code = error.code().name.lower().replace("_", " ")
        raise ConnectionError(
            f"{where}what listens there does not answer as Ray does ({code})"
        ) from None
    finally:
        channel.close()


@contextmanager
def _own_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces in the main thread. Where Ray's handler
    has ended the block, SIGTERM is raised again for the restored one."""
    handler, terminated = signal.getsignal(signal.SIGTERM), False
    try:
        yield
    except SystemExit:
        terminated = True
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
            if terminated:
                signal.raise_signal(signal.SIGTERM)


def _inherited_variables() -> dict[str, str]:
    """The variables of this process's environment that workers on a cluster's nodes need, unless
    the Ray job sets them: to find files and models, and to connect devices. A local cluster's
    workers have all."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    of_job = job.get("runtime_env", {}).get("env_vars", {})
    own = {name: value for name, value in os.environ.items() if name.startswith(INHERITED)}
    return {name: value for name, value in ({HIDE_GPUS: "1"} | own).items() if name not in of_job}


def start_actor(kind: Any, *arguments: Any, **options: Any) -> ray.actor.ActorHandle:
    """An actor of the class `kind`, made with `arguments`, with Ray's `options`."""
    return ray.remote(kind).options(**options).remote(*arguments)


def get(references: Any) -> Any:
    """`ray.get`, with bad input found by a worker as the :class:`UserError` that it is."""
    try:
        return ray.get(references)
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from None
        raise
    except RayActorError as error:  # the error of a constructor comes as a traceback
        if error.actor_init_failed and (line := user_error(str(error).strip())) is not None:
            raise UserError(line) from None
        raise


class Remote:
    """An actor with the interface of a local object: a method call waits for its result."""

    def __init__(self, actor: ray.actor.ActorHandle) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.actor, name)
        return lambda *args, **options: get(method.remote(*args, **options))

    @property
    def lost(self) -> bool:
        """Whether the actor is gone, with its process or its node."""
        try:
            ray.get(self.actor.__ray_ready__.remote())
        except RayActorError:
            return True
        return False

    def kill(self) -> None:
        """End the actor's process."""
        ray.kill(self.actor)


def user_error(traceback: str) -> str | None:
    """The message of a traceback's error, if that is a :class:`UserError`."""
    start, last = f"{UserError.__module__}.{UserError.__name__}: ", traceback.rpartition("\n")[2]
    return last.removeprefix(start) if last.startswith(start) else None


def alive_nodes() -> list[dict[str, Any]]:
    """Ray's description of each node of the cluster."""
    return [node for node in ray.nodes() if node["Alive"]]


def resources(threads: int, device: str) -> dict[str, float]:
    """The resources of a process that decodes: its threads, and a GPU if the cluster has one, or
    its autoscaler adds one, and `device` allows it. Raises :class:`UserError` for more threads than
    any cluster node has that can run it, for a GPU that the cluster lacks, and for another number
    than 0: a process sees only the GPU that Ray gave it, as cuda:0."""
    if device.startswith("cuda:") and device != "cuda:0":
        raise UserError(f"runner.device: {device}, but Ray chooses the GPU: runner.device: cuda")
    nodes = [node["Resources"] for node in alive_nodes()]
    with_gpu = [node for node in nodes if node.get("GPU", 0) >= 1]
    if device == "cpu":
        with_gpu = []
    elif not with_gpu and comes(threads, gpus=1):
        return {"CPU": threads, "GPU": 1}
    if device.startswith("cuda") and not with_gpu:
        raise UserError(f"runner.device: {device}, but the cluster has no GPU")
    most = max(node.get("CPU", 0) for node in with_gpu or nodes)
    if threads > most and not comes(threads, gpus=int(bool(with_gpu))):
        which = "nodes with a GPU" if with_gpu else "nodes"
        raise UserError(f"runner.threads: {threads} asked for, the cluster's {which} have {most:g}")
    return {"CPU": threads, "GPU": int(bool(with_gpu))}


def listening_address() -> str:
    """The address at which the cluster's other processes reach this one: its node's, or loopback's
    where all nodes are on one machine."""
    addresses = {node["NodeManagerAddress"] for node in alive_nodes()}
    return "127.0.0.1" if len(addresses) == 1 else str(ray.util.get_node_ip_address())


def room(needs: dict[str, float]) -> int:
    """How many processes with these needs fit on all nodes."""
    nodes = [node["Resources"] for node in alive_nodes()]
    return sum(
        min(int(node.get(kind, 0) // amount) for kind, amount in needs.items() if amount)
        for node in nodes
    )


def check_nodes(pair: PairSpec) -> None:
    """Raises :class:`UserError` where a node with CPUs lacks a folder of `pair`: models given by
    folder must be on all nodes, at the same path."""
    models = [pair.target, *pair.drafts.values()]
    folders = [model for model in models if Path(present_path(model)).is_dir()]
    here = ray.get_runtime_context().get_node_id()
    nodes = [n for n in alive_nodes() if n["Resources"].get("CPU", 0) >= 1]
    others = {n["NodeID"]: n["NodeManagerAddress"] for n in nodes if n["NodeID"] != here}
    if not folders:
        return
    placed = [NodeAffinitySchedulingStrategy(node, soft=False) for node in others]
    checks = [_missing.options(scheduling_strategy=each).remote(folders) for each in placed]
    for address, missing in zip(others.values(), get(checks), strict=True):
        if missing:
            raise UserError(
                f"{missing[0]}: not on the cluster's node {address}; give a hub id, or put the "
                "folder where all nodes see it"
            )


@ray.remote(num_cpus=0)
def _missing(folders: Sequence[str]) -> list[str]:
    return [folder for folder in folders if not Path(present_path(folder)).is_dir()]
