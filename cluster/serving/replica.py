"""One replica of a fleet: an engine that decodes, and the engines beside it on the same devices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import monotonic
from typing import Generic

from cluster.serving.canary import Side
from cluster.serving.engine_loop import EngineFailed
from cluster.serving.served import S

_LOOK = 0.05  # seconds between checks whether an old engine has finished
AT_ONCE = 10.0  # seconds: an engine that has worked for less has failed at once
_FREE = 3  # engines in a row that have failed at once until there is a pause
_PAUSE = 60.0  # seconds between two starts of engines that fail at once, at most


class FleetReplica(Generic[S]):
    """`served` is the champion. A challenger may be beside it, and old engines that finish their
    requests."""

    def __init__(self, name: str, served: S) -> None:
        self.name, self.served = name, served
        self.challenger: S | None = None
        self.restarts = 0
        self.failure: EngineFailed | None = None  # why no engine could be started
        self.failing = 0  # engines in a row that have failed at once
        self.restarting: asyncio.Task[FleetReplica[S]] | None = None
        self._started = monotonic()
        self._draining: dict[S, asyncio.Task[None]] = {}
        self._cancelled = 0  # of engines that have ended

    def engines(self) -> Iterator[S]:
        """All engines that are loaded."""
        yield self.served
        if self.challenger is not None:
            yield self.challenger
        yield from (served for served in self._draining if served is not self.served)

    def side(self, side: Side) -> S | None:
        """The engine of that side, if there is one that works."""
        served = self.served if side == "champion" else self.challenger
        return served if served is not None and served.works else None

    @property
    def running(self) -> int:
        """Requests that are waiting or being decoded."""
        return sum(served.running for served in self.engines())

    @property
    def waiting(self) -> int:
        """Requests that have no slot."""
        return sum(served.waiting for served in self.engines())

    @property
    def cancelled(self) -> int:
        """Submissions given up by their clients."""
        return self._cancelled + sum(served.cancelled for served in self.engines())

    @property
    def pause(self) -> float:
        """Seconds until another engine is started: none after the first failures, then doubled."""
        return 0.0 if self.failing < _FREE else min(2.0 ** (self.failing - _FREE), _PAUSE)

    def count_failure(self) -> None:
        """The engine has failed, or could not be started."""
        at_once = self.failure is not None or monotonic() - self._started < AT_ONCE
        self.failing = self.failing + 1 if at_once else 0

    def switch(self, served: S) -> None:
        """Decode new requests by another engine; the old one finishes its requests and ends."""
        old, self.served = self.served, served
        self.failure, self._started = None, monotonic()
        self.retire(old)

    def retire(self, served: S) -> None:
        """Let an engine finish its requests and end."""
        if served is self.challenger:
            self.challenger = None
        self._draining[served] = asyncio.create_task(self._drain(served))

    async def _drain(self, served: S) -> None:
        while served.running:
            await asyncio.sleep(_LOOK)
        await served.finish()
        self._cancelled += served.cancelled
        del self._draining[served]

    async def close(self) -> None:
        """Decode no more. The engines are still to be ended."""
        if self.restarting is not None:
            self.restarting.cancel()
        for task in self._draining.values():
            task.cancel()
        for served in [*self.engines()]:
            await served.close()
