"""Waiting for nodes that an autoscaler may add. A placement group asks for them, and the autoscaler
starts nodes or not."""

from __future__ import annotations

import json
import logging
import time

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

logger = logging.getLogger(__name__)

ANSWER = 30.0  # seconds in which an autoscaler begins to start nodes; it looks every five
START = 1800.0  # seconds that nodes may take, with their machines and images
TELL = 60.0  # seconds between two lines of progress

_answers: dict[tuple[str, float, float, int], bool] = {}  # by cluster and what was asked for


def autoscaled() -> bool:
    """Whether an autoscaler adds nodes to the connected cluster."""
    # Without one, Ray names the type of each node after the node.
    return any(not kind.startswith("node_") for kind in _report()[0])


def wait_for(group: PlacementGroup, seconds: float) -> bool:
    """Whether `group` is reserved within `seconds`, or, while the autoscaler starts nodes for it,
    within :data:`START`."""
    began = told = time.monotonic()
    limit = max(seconds, ANSWER) if autoscaled() else seconds
    while not group.wait(min(1.0, limit)):
        now = time.monotonic()
        if _report()[1]:
            limit = min(now - began + ANSWER, START)
        if now - began > limit:
            return False
        if now - told > TELL:
            told = now
            logger.warning("waiting for the cluster's nodes to start, %d s", now - began)
    return True


def comes(cores: float, gpus: float = 0, processes: int = 1) -> bool:
    """Whether the autoscaler adds nodes for processes with so many CPU cores and GPUs each; waits
    until the nodes have started. The answer is kept."""
    key = str(ray.get_runtime_context().gcs_address), cores, gpus, processes
    if key not in _answers:
        _answers[key] = False
        if autoscaled():
            needs = {"CPU": cores, "GPU": gpus}
            group = placement_group([{name: n for name, n in needs.items() if n}] * processes)
            _answers[key] = wait_for(group, 0)
            remove_placement_group(group)
    return _answers[key]


def _report() -> tuple[set[str], bool]:
    """The types of the cluster's nodes, and whether nodes are being started, as its autoscaler (of
    either version) has last reported."""
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    nodes = [*status.active_nodes, *status.idle_nodes]
    types = {str(node.ray_node_type_name) for node in nodes} - {""}
    starting = bool(status.pending_launches or status.pending_nodes)
    if reported := _internal_kv_get(DEBUG_AUTOSCALING_STATUS):
        report = json.loads(reported).get("autoscaler_report") or {}
        types |= {*report.get("active_nodes", ())}
        starting = starting or bool(report.get("pending_launches") or report.get("pending_nodes"))
    return types, starting
