"""Values by name, in an actor: where the ranks of a split model meet before they are connected."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence


class Board:
    """Reached through Ray alone, and so by processes of its cluster alone. Its methods implement
    :class:`cluster.sharded_target.store.BoardStore`."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Condition()

    async def set(self, key: str, value: bytes) -> None:
        async with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    async def add(self, key: str, amount: int) -> int:
        number = int(self._values.get(key, b"0")) + amount
        await self.set(key, b"%d" % number)
        return number

    async def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    async def get(self, key: str) -> bytes:
        """Waits until there is a value."""
        async with self._changed:
            await self._changed.wait_for(lambda: key in self._values)
        return self._values[key]

    async def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None
