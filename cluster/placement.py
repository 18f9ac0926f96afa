"""Reserving devices for draft and target: from a small file to Ray placement groups."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.session import alive_nodes
from specdec_core.base.errors import UserError
from specdec_core.config import Placement

# Ray reserves free resources in milliseconds. Busy ones may be released soon.
WAIT = 20.0


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
        try:
            group, bundle = self.bundles[role, rank]
        except KeyError:
            raise ValueError(f"no device was placed for {role} {rank}") from None
        options: dict[str, Any] = {
            "num_cpus": 1,
            "num_gpus": int(self.kind == "GPU"),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
        }
        if self.kind == "CPU":
            # Ray may leave GPUs visible to an actor that has none.
            options["runtime_env"] = {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}
        return options

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
    """Reserve devices on the connected cluster, waiting up to `wait` seconds for busy ones.

    Raises:
        UserError: the cluster lacks the devices.
    """
    gpus = [int(node["Resources"].get("GPU", 0)) for node in alive_nodes()]
    kind: Literal["GPU", "CPU"] = "GPU" if sum(gpus) and placement.device != "cpu" else "CPU"
    name = "GPUs" if kind == "GPU" else "CPU cores"
    nodes = [int(node["Resources"].get(kind, 0)) for node in alive_nodes()]
    where = "one node" if len(nodes) == 1 else f"{len(nodes)} nodes of {sorted(nodes)[::-1]}"
    has = f"{sum(nodes)} {name} on {where}"
    if placement.device == "gpu" and kind != "GPU":
        raise UserError(f"device: gpu, but the cluster has none: {has}")
    target, draft, most = placement.target.devices, placement.draft.devices, max(nodes)
    needed = f"{target + draft} {name} needed (draft {draft}, target {target})"
    if sum(nodes) < target + draft:
        raise UserError(f"{needed}, but the cluster has {has}")
    if placement.strategy == "strict_pack" and most < target:
        raise UserError(
            f"{needed}, the target's in one node (strategy: strict_pack), but the cluster has"
            f" {has}; `strategy: pack` may use several nodes"
        )
    deadline = time.monotonic() + wait
    # On one node if possible: messages between draft and target then stay in it.
    if most >= target + draft:
        together = [("STRICT_PACK", target + draft)]
        if placed := _reserve(placement, kind, together, deadline - wait / 2):
            return placed
    parts = [("STRICT_PACK" if most >= target else "PACK", target), *([("PACK", 1)] * draft)]
    if placed := _reserve(placement, kind, parts, deadline):
        return placed
    free = int(ray.available_resources().get(kind, 0))
    raise UserError(f"{needed}, but of {has} only {free} were free within {wait:g} s")


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
    for strategy, devices in parts:
        group = placement_group([bundle] * devices, strategy=strategy)
        placed.groups.append(group)
        if not group.wait(max(deadline - time.monotonic(), 0.1)):
            placed.remove()
            return None
        slots += [(group, index) for index in range(devices)]
    ranks = [("target", rank) for rank in range(placement.target.devices)]
    placed.bundles = dict(zip([*ranks, ("draft", 0)], slots, strict=False))
    return placed
