"""A node reserved for a measurement: times depend on load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ray.util.placement_group import placement_group, remove_placement_group

from cluster.placement import Placed
from cluster.session import Remote, alive_nodes
from specdec_core.base.observer import Observer

AT_ONCE = 5.0  # seconds in which an unused node can be reserved
ALONE_SECONDS = 600.0  # that a measurement waits for other work to leave its node


@contextmanager
def alone(
    measuring: Remote, gpus: float, observer: Observer, placed: Placed | None = None
) -> Iterator[None]:
    """Reserve every core of the measuring process's node during the block, so that Ray runs no
    other work there: another sweep's trials, a recording, a training. Beside cores that are
    `placed` for its models, the other cores of their nodes are reserved, too. Waits for running
    work, ten minutes at most, and reports it. A process on a GPU has the GPU to itself already."""
    held = {} if placed is None else placed.cores()  # elsewhere, where a node was lost
    left = {} if gpus else left_cores(alive_nodes(), {measuring.node(): 0, **held})
    if not left:
        yield
        return
    hold = placement_group(
        [{"CPU": cores} for cores in left.values()],
        bundle_label_selector=[{"ray.io/node-id": node_id} for node_id in left],
    )
    try:
        if not hold.wait(AT_ONCE):
            addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in alive_nodes()}
            where = ", ".join(addresses.get(node_id, node_id) for node_id in left)
            observer.stage(f"waiting for other work to leave {where}")
            if not hold.wait(ALONE_SECONDS):
                observer.warned(f"times are taken beside other work on {where}")
        yield
    finally:
        remove_placement_group(hold)


def left_cores(nodes: Sequence[dict[str, Any]], held: Mapping[str, float]) -> dict[str, float]:
    """The cores of the nodes in `held` that are not held, by node; no node that is held as a
    whole."""
    cores = {node["NodeID"]: node["Resources"].get("CPU", 0) for node in nodes}
    left = {node_id: cores.get(node_id, 0) - number for node_id, number in held.items()}
    return {node_id: number for node_id, number in left.items() if number > 0}
