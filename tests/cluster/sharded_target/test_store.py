"""The store of a group of ranks, as PyTorch uses it."""

import ray
import torch.distributed as dist

from cluster.sharded_target.board import Board
from cluster.sharded_target.store import BoardStore


def test_a_group_may_be_split(ray_running):
    """With NCCL a mesh of one dimension is a group, which has a clone of the store."""
    store = BoardStore(ray.remote(Board).remote())
    part = dist.PrefixStore("part", store).clone()
    part.set("key", "value")
    assert part.get("key") == b"value"
    assert store.get("part/key") == b"value"
