"""Reserving devices for draft and target: from a small file to Ray placement groups."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

import ray
from ray._private.state import actors
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.autoscaling import autoscaled, comes, wait_for
from cluster.session import alive_nodes
from specdec_core.base.errors import UserError
from specdec_core.config import Placement

# Ray reserves free resources in milliseconds. Busy ones may be released soon.
WAIT = 20.0
_OWNED = "specdec"  # the first word of the names of groups that actors have reserved


@dataclass
class Placed:
    """Devices reserved for a placement, until :meth:`remove`.

    `bundles` holds the group and bundle of the draft and of each rank of the target.
    """

    placement: Placement
    kind: Literal["GPU", "CPU"]
    groups: list[PlacementGroup] = field(default_factory=list)
    bundles: dict[tuple[str, int], tuple[PlacementGroup, int]] = field(default_factory=dict)

    def options(self, role: Literal["draft", "target"], rank: int = 0) -> dict[str, Any]:
        """Options of the one actor that may run on this device, for `ActorClass.options(...)`."""
        group, bundle = self.bundles[role, rank]
        return {
            "num_cpus": 1,
            "num_gpus": int(self.kind == "GPU"),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
        }

    def cores(self) -> Counter[str]:
        """The number of reserved CPU cores, by the id of their node."""
        nodes = {g.id: placement_group_table(g)["bundles_to_node_id"] for g in self.groups}
        return Counter(nodes[group.id][bundle] for group, bundle in self.bundles.values())

    def remove(self) -> None:
        """Release the devices; actors on them end."""
        for group in self.groups:
            remove_placement_group(group)
        self.groups, self.bundles = [], {}


def place(placement: Placement, wait: float = WAIT) -> Placed:
    """Reserve devices on the connected cluster, waiting up to `wait` seconds for busy ones, and for
    nodes that its autoscaler starts.

    Raises:
        UserError: the cluster lacks the devices.
    """
    _release_lost()
    kind, nodes = _devices(placement)
    name = "GPUs" if kind == "GPU" else "CPU cores"
    where = "one node" if len(nodes) == 1 else f"{len(nodes)} nodes of {sorted(nodes)[::-1]}"
    has = f"{sum(nodes)} {name} on {where}"
    if kind == "GPU":
        has += ", counting those with a CPU core each"
    target, draft, most = placement.target.devices, placement.draft.devices, max(nodes)
    needed = f"{target + draft} {name} needed (draft {draft}, target {target})"
    grows = autoscaled()
    if sum(nodes) < target + draft and not grows:
        raise UserError(f"{needed}, but the cluster has {has}")
    strict = placement.strategy == "strict_pack"
    if strict and most < target and not grows:
        raise UserError(
            f"{needed}, the target's in one node (strategy: strict_pack), but the cluster has"
            f" {has}; `strategy: pack` may use several nodes"
        )
    apart = [("PACK", 1)] * draft
    attempts = []
    # On one node if possible: messages between draft and target then stay in it.
    if grows or most >= target + draft:
        attempts.append([("STRICT_PACK", target + draft)])
    if grows or most >= target:
        attempts.append([("STRICT_PACK", target), *apart])
    if most < target and not strict:
        attempts.append([("PACK", target), *apart])
    began = time.monotonic()
    for number, parts in enumerate(attempts, start=1):
        if placed := _reserve(placement, kind, parts, began + wait * number / len(attempts)):
            return placed
    free = int(ray.available_resources().get(kind, 0))
    more = ", and its autoscaler adds none" if grows else ""
    raise UserError(f"{needed}, but of {has} only {free} were free within {wait:g} s{more}")


def _devices(placement: Placement) -> tuple[Literal["GPU", "CPU"], list[int]]:
    """The kind of devices, and how many of it each node can give to an actor with a CPU core: none
    where the nodes that an autoscaler has added are gone again."""
    cores, gpus = _cores_and_gpus()
    if placement.device == "cpu" or not (any(gpus) or comes(1, gpus=1)):
        if placement.device == "gpu":
            raise UserError(f"device: gpu, but the cluster has none: {sum(cores)} CPU cores")
        return "CPU", cores
    if not any(gpus):  # one has come
        cores, gpus = _cores_and_gpus()
    return "GPU", list(map(min, cores, gpus))


def _cores_and_gpus() -> tuple[list[int], list[int]]:
    """How many each node has."""
    nodes = [node["Resources"] for node in alive_nodes()]
    cores, gpus = ([int(node.get(kind, 0)) for node in nodes] for kind in ("CPU", "GPU"))
    return cores, gpus


def release(actor: str) -> None:
    """Remove what the actor of that id has reserved: Ray keeps it when the actor is killed."""
    for group, owner, _ in _reserved():
        if owner == actor:
            remove_placement_group(group)


def _release_lost() -> None:
    """Remove what actors that are dead have reserved, and what this actor has before it was started
    again, in another worker: Ray keeps both as long as the job runs."""
    actor, worker = _actor_and_worker()
    for group, owner, by in _reserved():
        lost = by != worker if owner == actor else actors(owner).get("State") == "DEAD"
        if lost:
            remove_placement_group(group)


def _reserved() -> list[tuple[PlacementGroup, str, str]]:
    """The groups that actors of all jobs have reserved, with the ids of actor and worker. Removing
    one that is gone meanwhile does nothing."""
    found = []
    for each in placement_group_table().values():
        word, *ids = each["name"].split(" ")
        if word == _OWNED and each["state"] != "REMOVED":
            # Ray finds a name in this job's namespace alone.
            group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(each["placement_group_id"])))
            found.append((group, ids[0], ids[1]))
    return found


def _actor_and_worker() -> tuple[str, str]:
    """The ids of this actor, empty where there is none, and of its process."""
    context = ray.get_runtime_context()
    return context.get_actor_id() or "", context.get_worker_id()


def _reserve(
    placement: Placement,
    kind: Literal["GPU", "CPU"],
    parts: list[tuple[str, int]],
    deadline: float,
) -> Placed | None:
    """Groups of (strategy, devices), the target's bundles first; None if they are not free before
    the deadline."""
    placed = Placed(placement, kind)
    bundle = {"CPU": 1.0, "GPU": 1.0} if kind == "GPU" else {"CPU": 1.0}
    slots: list[tuple[PlacementGroup, int]] = []
    actor, worker = _actor_and_worker()
    for strategy, devices in parts:
        name = f"{_OWNED} {actor} {worker} {uuid4().hex}" if actor else ""
        group = placement_group([bundle] * devices, strategy=strategy, name=name)
        placed.groups.append(group)
        if not wait_for(group, max(deadline - time.monotonic(), 0.1)):
            placed.remove()
            return None
        slots += [(group, index) for index in range(devices)]
    ranks = [("target", rank) for rank in range(placement.target.devices)]
    placed.bundles = dict(zip([*ranks, ("draft", 0)], slots, strict=False))
    return placed
