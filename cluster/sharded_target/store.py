"""The store by which `torch.distributed` connects its ranks, kept by an actor."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import ray
import torch.distributed as dist

LIMIT = 300.0  # seconds that other ranks may take


class BoardStore(dist.Store):
    """The values of a :class:`cluster.sharded_target.board.Board`. PyTorch's own `TCPStore` opens a
    port at which every process of the network can read and replace them."""

    def __init__(self, board: ray.actor.ActorHandle) -> None:
        super().__init__()
        self._board = board

    def clone(self) -> dist.Store:
        """For a part of a group. Its calls go to the same actor, from any thread."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return bytes(self._ask("get", key))

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, value))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = LIMIT if timeout is None else timeout.total_seconds()
        ray.get([self._board.get.remote(key) for key in keys], timeout=limit)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    def _ask(self, name: str, *arguments: Any) -> Any:
        return ray.get(getattr(self._board, name).remote(*arguments), timeout=LIMIT)
