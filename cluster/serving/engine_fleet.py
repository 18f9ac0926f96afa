"""A fleet of this library's engines, and the way of a request through it.

A request goes to one replica, and is continued by another engine where its engine fails.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Self

from cluster.serving.canary import Side
from cluster.serving.engine_loop import EngineFailed, LoopObserver, QueueFull, Submission
from cluster.serving.fleet import Fleet
from cluster.serving.prefixes import Prefixes, Reason
from cluster.serving.replica import FleetReplica
from cluster.serving.served import NOT_OPERATED, Operation, ServedEngine
from cluster.serving.stream import Stream
from specdec_core.engine import Request
from specdec_core.tokens.statistics import Generation

_SHARE = 30.0  # seconds between exchanges of what the bandits have learned
KEEP = 60.0  # seconds between copies of what was learned


class EngineFleet(Fleet[ServedEngine]):
    """Answers requests by the engines of its replicas."""

    def __init__(self, served: Sequence[ServedEngine], operation: Operation = NOT_OPERATED) -> None:
        super().__init__(served, operation)
        self.resumed = 0  # requests that another engine continued
        self.routed: Counter[Reason] = Counter({"prefix": 0, "busy": 0, "load": 0})
        self.observer = LoopObserver()
        self._prefixes = Prefixes(served[0].loop.engine.slots)

    def observe(self, observer: LoopObserver) -> None:
        """Have `observer` follow the requests of all engines."""
        self.observer = observer
        for replica in self.replicas:
            for served in replica.engines():
                served.loop.observer = observer

    async def __aenter__(self) -> Self:
        for replica in self.replicas:
            replica.served.loop.open()
        await super().__aenter__()
        self.repeat(_SHARE, self.share)
        self.repeat(KEEP, self.keep_learned)
        return self

    def end(self) -> None:
        """Save what was learned, and end the engines' processes."""
        learner = self._learner
        with suppress(RuntimeError):  # its process has ended
            learner.save(learner.state())
        super().end()

    async def submit(self, requests: Sequence[Request]) -> Stream:
        """Hand all requests to one engine, or none.

        Raises:
            UserError: the engine rejects a request.
            QueueFull: too many are waiting, also at the least busy replica.
            EngineFailed: no engine works.
        """
        side = await self._side(requests)
        try:
            served, submission = await self._hand(requests, side)
        except EngineFailed:
            self.observer.failed([request.id for request in requests])
            raise
        return Stream(requests, served, submission, self._resume, self._ended)

    async def _resume(self, requests: Sequence[Request]) -> tuple[ServedEngine, Submission]:
        """Hand requests that an engine has begun to another one. Raises :class:`EngineFailed`."""
        self.resumed += len(requests)
        for request in requests:  # its time is that of two engines
            self._ended(request.id, None)
        return await self._hand(requests, "champion", begun=True)

    async def _hand(
        self, requests: Sequence[Request], side: Side, begun: bool = False
    ) -> tuple[ServedEngine, Submission]:
        """Hand requests to the preferred replica, if its queue is full to the least busy other one,
        and if all engines have failed to the first one that is started again."""
        tokens, full = requests[0].text, None
        working = {replica.name: replica for replica in self.replicas if replica.side(side)}
        choice = self._prefixes.choose(
            tokens, {name: replica.running for name, replica in working.items()}
        )
        for name in choice.replicas:
            replica, served = working[name], working[name].side(side)
            if served is None:
                continue
            try:
                submission = served.loop.submit(requests, begun)
            except EngineFailed:  # just now
                continue
            except QueueFull as error:
                if full is not None:
                    break
                full = error
                continue
            if len(self.replicas) > 1:
                self._prefixes.sent(name, tokens)
            if not begun:
                self.routed[choice.reason if name == choice.replicas[0] else "busy"] += 1
            return served, submission
        if full is not None:
            self.observer.refused()
            raise full
        replica = await self._revived(begun)
        return replica.served, replica.served.loop.submit(requests, begun)

    async def _side(self, requests: Sequence[Request]) -> Side:
        """Which side of a canary takes these requests. A challenger that is decided about is
        promoted or dropped first, unless something is being loaded: no client waits for that."""
        canary = self._trying
        if canary is None:
            return "champion"
        if canary.state == "running":
            side = canary.choose([request.id for request in requests])
            if canary.state == "running":
                if side == "champion" or all(c.works for c in canary.sides[side]):
                    return side
                canary.end("dropped", "its engine has failed")
        if not (self._changing.locked() or self._loading):
            async with self._alone():
                await self._decide(canary)
        return "champion"

    def _ended(self, request_id: str, generation: Generation | None) -> None:
        """A request has ended, or was given up."""
        if self._trying is not None:
            self._trying.ended(request_id, generation)

    async def _revived(self, begun: bool) -> FleetReplica[ServedEngine]:
        """The first replica with an engine that is started again. New requests, which were not
        `begun`, are refused while there is a pause. Raises :class:`EngineFailed`."""
        if not begun and all(replica.pause for replica in self.replicas):
            failing = self.replicas[0].failing
            raise EngineFailed(f"{failing} engines in a row have failed at once")
        failure = EngineFailed("no engine works")
        # The tasks continue where the client that waits for them leaves.
        for restarted in asyncio.as_completed([self._restart(each) for each in self.replicas]):
            try:
                return await restarted
            except EngineFailed as failed:
                failure = failed
        raise failure

    # What bandits learn.

    async def share(self) -> None:
        """Have every replica's bandit learn what the other bandits have learned."""
        if len(self.replicas) < 2:
            return
        loops = [replica.served.loop for replica in self.replicas if self._current(replica)]
        learned = {loop: loop.engine.learned for loop in loops}
        gains = {
            loop: await loop.between_steps(memory.gained)
            for loop, memory in learned.items()
            if memory is not None
        }
        for loop, memory in learned.items():
            for other, gain in gains.items():
                if memory is not None and other is not loop:
                    await loop.between_steps(partial(memory.absorb, gain))

    async def keep_learned(self) -> None:
        """Save what the bandits have learned, so that little is lost however the server ends. One
        replica's state is enough, as they share what they learn."""
        await self._learner.keep_learned()

    @property
    def _learner(self) -> ServedEngine:
        """The first engine that works."""
        return next(iter(self.working), self.replicas[0].served)
