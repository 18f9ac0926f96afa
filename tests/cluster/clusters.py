"""Clusters of several nodes, and drivers that run in processes of their own."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

from ray._private.state import actors
from ray.actor import ActorHandle
from ray.cluster_utils import Cluster
from ray.experimental import internal_kv


@contextmanager
def running_cluster(nodes: int = 0, **head: Any) -> Iterator[Cluster]:
    """A cluster: a head with these options, and `nodes` further nodes of one core each."""
    own = internal_kv.internal_kv_get_gcs_client()
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **head})
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()
        if own is not None:  # of another Ray that runs in this process, which this ended, too
            internal_kv._initialize_internal_kv(own)


def process_of(actor: ActorHandle) -> int:
    """The number of an actor's process on its node, which Ray knows also while the actor serves."""
    return actors(actor._actor_id.hex())["Pid"]


def node_of(actor: ActorHandle) -> str:
    """The id of an actor's node."""
    return actors(actor._actor_id.hex())["Address"]["NodeID"]


def in_a_process(function: Callable[..., None], *arguments: object) -> None:
    """Run a driver in a separate process, as other tests' Ray may run in this one."""
    with ProcessPoolExecutor(1, get_context("spawn")) as driver:
        driver.submit(function, *arguments).result()
