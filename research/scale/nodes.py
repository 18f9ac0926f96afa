"""Ray nodes simulated on this machine, each with a scheduler and an object store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from cluster.session import QUIET, ray_session
from research.scale.memory import available
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer

# Memory in MiB: a node's scheduler and agents, an idle trial's process, the driver with Ray's head,
# and a process that decodes with the bundled pair.
NODE, IDLE, HEAD, DECODING = 140, 125, 1200, 700
NODES_NICE = 10  # niceness of the nodes
OBJECTS = 80 << 20  # bytes of a node's object store, the least that Ray takes
# Many nodes on one machine do without monitoring it, each for itself, and without processes that
# are started in advance.
LIGHT = {
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    # Many processes starting at once on few cores are slow, not lost.
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_health_check_failure_threshold": "40",
}


def check_memory(nodes: int, slots: int, idle: bool) -> None:
    """Raises :class:`UserError` unless so many nodes fit into the free memory of this machine."""
    needed = HEAD + nodes * (NODE + slots * (IDLE if idle else DECODING))
    free = available()
    if needed > free:
        raise UserError(
            f"--nodes {nodes}: with {slots} slots each they take about {needed / 1024:.1f} GiB of"
            f" memory and {free / 1024:.1f} GiB are free; give fewer"
        )


@contextmanager
def local_nodes(nodes: int, slots: int, observer: Observer) -> Iterator[None]:
    """`nodes` nodes of `slots` cores and a head that does nothing else; this process is connected
    to them."""
    if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        raise UserError("research.scale starts its own nodes: unset RAY_ADDRESS")
    for name, value in {**QUIET, **LIGHT}.items():
        os.environ.setdefault(name, value)
    observer.stage(f"starting {nodes} nodes", nodes)
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        for _ in range(nodes):
            cluster.add_node(wait=False, num_cpus=slots, object_store_memory=OBJECTS)
            observer.step()
        cluster.wait_for_nodes(timeout=60 + 10 * nodes)
        for node in cluster.worker_nodes:
            for process in chain.from_iterable(node.all_processes.values()):
                _give_way(process.process.pid)
        os.environ["RAY_ADDRESS"] = cluster.address
        with ray_session():
            yield
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        cluster.shutdown()


def _give_way(pid: int) -> None:
    """Lower the priority of a process and its children below this driver's: on a real cluster they
    share no cores."""
    with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), NODES_NICE)
            for child in (thread / "children").read_text().split():
                _give_way(int(child))
