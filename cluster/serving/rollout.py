"""The configuration that is served is replaced while requests run, and so is an engine that failed.

A new engine is loaded beside the old one. Once it is ready, new requests go to it; the old one
finishes those that it has, and ends. A configuration that cannot be loaded changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from time import monotonic
from typing import TypeVar

from cluster.placed_engine import check_models
from cluster.serving.canary import CONFIDENCE, Canary, check_comparable
from cluster.serving.engine_loop import EngineFailed, LoopObserver, Submission
from cluster.serving.engine_process import EngineProcess
from cluster.serving.served import NOT_OPERATED, Deployment, Operation, Served
from cluster.serving.stream import Stream
from specdec_core.base.errors import UserError
from specdec_core.engine import Engine, Request
from specdec_core.models.fingerprints import TARGET
from specdec_core.models.pair import check_pair
from specdec_core.tokens.statistics import Generation

logger = logging.getLogger(__name__)

_LOOK = 0.05  # seconds between looks at whether an old engine has finished
_WATCH = 1.0  # and at whether the current one is alive
_AT_ONCE = 10.0  # seconds: an engine that has worked for less has failed at once
_FREE = 3  # engines in a row that have failed at once until there is a pause
_PAUSE = 60.0  # seconds between two starts of engines that fail at once, at most

T = TypeVar("T")


class Rollout:
    """Answers requests with the deployment that is `current`. Use as `async with`."""

    def __init__(self, served: Served, operation: Operation = NOT_OPERATED) -> None:
        self.current, self.operation = served, operation
        self.previous: Deployment | None = None  # to which a rollback returns
        self.restarts = 0
        self.switches = 0
        self._beside: list[Served] = []  # a challenger
        self._draining: dict[Served, asyncio.Task[None]] = {}
        self._cancelled = 0  # of engines that are gone
        self._changing = asyncio.Lock()
        self._restarting: asyncio.Task[Served] | None = None
        self._started, self._failing = monotonic(), 0  # engines in a row that have failed at once
        self._broken: EngineFailed | None = None  # no engine works, and none could be started
        self.observer = LoopObserver()
        self.canary: Canary | None = None  # the last one

    def observe(self, observer: LoopObserver) -> None:
        """Have `observer` follow the requests of this engine and all that come."""
        self.observer = self.current.loop.observer = observer

    async def __aenter__(self) -> Rollout:
        self.current.loop.open()
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()
        if self._restarting is not None:
            self._restarting.cancel()
        for served, task in [*self._draining.items()]:
            task.cancel()
            served.loop.close()
            served.end()
        for served in self._beside:
            served.loop.close()
            served.end()
        self.current.loop.close()

    @property
    def engine(self) -> Engine | EngineProcess:
        """The one that new requests go to."""
        return self.current.loop.engine

    @property
    def queue(self) -> int:
        """Requests that may wait."""
        return self.current.loop.queue

    @property
    def running(self) -> int:
        """Requests that are waiting or being decoded."""
        return sum(served.loop.running for served in self._all())

    @property
    def waiting(self) -> int:
        """Requests that have no slot."""
        return sum(served.loop.waiting for served in self._all())

    @property
    def full(self) -> bool:
        """Whether so many wait that no more are taken."""
        return self.current.loop.full

    @property
    def takes(self) -> bool:
        """Whether requests that come now are answered without waiting for another engine."""
        return self.current.loop.works and self.failure is None and not self.full

    @property
    def _pause(self) -> float:
        """Seconds until another engine is started: none after the first failures, then doubled."""
        return 0.0 if self._failing < _FREE else min(2.0 ** (self._failing - _FREE), _PAUSE)

    @property
    def cancelled(self) -> int:
        """Submissions given up by their clients."""
        return self._cancelled + sum(served.loop.cancelled for served in self._all())

    @property
    def failure(self) -> EngineFailed | None:
        """Why nothing is answered, if so."""
        return self._broken or (None if self._replaceable else self.current.loop.failure)

    def check(self) -> None:
        """Raises :class:`EngineFailed` where no engine works and none can be started."""
        if not self._replaceable:
            self.current.loop.check()
        if self._broken:
            raise self._broken

    async def submit(self, requests: Sequence[Request], begun: bool = False) -> Stream[Served]:
        """Hand all requests to the engine, or none. Those that were `begun` by another server do
        not queue again.

        Raises:
            UserError: what the engine finds wrong with a request.
            QueueFull: too many are waiting.
            EngineFailed: the engine is broken, and so is another one.
        """
        for request in requests if begun else ():
            self.observer.resumed(request)
        try:
            if self._pause and not begun and not self.current.loop.works:
                raise EngineFailed(f"{self._failing} engines in a row have failed at once")
            served = await self._chosen(requests)
            try:
                submission = await served.loop.submit(requests, begun)
            except EngineFailed:  # just now
                served = await self.instead_of(served)
                submission = await served.loop.submit(requests, begun)
        except EngineFailed:
            self.observer.failed([request.id for request in requests])
            raise
        return Stream(self, served, requests, submission)

    async def between_steps(self, call: Callable[[], T]) -> T:
        """The result of `call`, run on the current engine's thread between two steps."""
        return await self.current.loop.between_steps(call)

    def finished(self, request_id: str, generation: Generation) -> None:
        """A request has ended."""
        if self._trying is not None:
            self._trying.finished(request_id, generation)

    def left(self, request_id: str) -> None:
        """A request was given up."""
        if self._trying is not None:
            self._trying.left(request_id)

    async def _chosen(self, requests: Sequence[Request]) -> Served:
        """Who takes these requests. A challenger that is decided about is promoted or dropped."""
        working = await self.working()
        if (trying := self._trying) is None:
            return working
        if trying.state == "running":
            chosen = trying.choose([request.id for request in requests])
            if trying.state == "running" and chosen.loop.works:
                return chosen
            if trying.state == "running":
                trying.end("dropped", "its engine has failed")
        if not self._changing.locked():  # else no client waits until something else is loaded
            async with self._changing:
                await self._decide(trying)
        return self.current

    async def _decide(self, canary: Canary) -> None:
        """Put a promoted challenger in the champion's place, or let a dropped one end."""
        challenger = canary.sides["challenger"]
        if challenger not in self._beside:
            return
        self._beside.remove(challenger)
        if canary.state == "promoted":
            old = self.current
            self._switch(challenger)
            self._switched(old)
            await asyncio.to_thread(self.operation.keep, challenger.deployment)
        else:
            self._retire(challenger)

    @property
    def _trying(self) -> Canary | None:
        """The canary that is not decided about."""
        running = self.canary is not None and self.canary.sides["challenger"] in self._beside
        return self.canary if running else None

    async def working(self) -> Served:
        """The current deployment, whose engine is started again where it has died. Raises
        :class:`EngineFailed`."""
        served = self.current
        try:
            served.loop.check()
        except EngineFailed:
            return await self.instead_of(served)
        return served

    async def go_on(self, failed: Served, requests: Sequence[Request]) -> tuple[Served, Submission]:
        """Hand requests that were begun to the engine that is instead of one that has failed.
        Raises :class:`EngineFailed`."""
        served = await self.instead_of(failed)
        return served, await served.loop.submit(requests, begun=True)

    async def instead_of(self, failed: Served) -> Served:
        """Who goes on for a deployment whose engine has failed: the current one, whose engine is
        started again if it is the one. Raises :class:`EngineFailed`."""
        if failed is not self.current:
            return self.current
        # In a task of its own: who asks first may leave while others wait.
        if self._restarting is None or self._restarting.done():
            self._restarting = asyncio.create_task(self._restart(failed))
        return await asyncio.shield(self._restarting)

    async def _restart(self, failed: Served) -> Served:
        at_once = monotonic() - self._started < _AT_ONCE
        self._failing = self._failing + 1 if at_once else 0
        await asyncio.sleep(self._pause)
        async with self._changing:
            if failed is not self.current:
                return self.current
            if self._broken is not None or not self._replaceable:
                raise self._broken or EngineFailed(str(failed.loop.failure))
            logger.warning("the engine has failed and is started again")
            try:
                deployment = await asyncio.to_thread(failed.deployment.as_here)
                self._switch(await failed.beside(deployment))
            except (UserError, RuntimeError, OSError) as error:
                self._broken = EngineFailed(f"the engine failed, and cannot be started: {error}")
                raise self._broken from None
            self.current.since = failed.since
            if self._trying is not None:
                self._trying.sides["champion"] = self.current
            self.restarts += 1
            self._retire(failed)
            return self.current

    async def deploy(self, deployment: Deployment) -> Served:
        """Serve this from now on, and nothing beside it. What is served already, of the same
        weights, is not loaded again. Raises :class:`UserError` where that cannot be; then all stays
        as it is."""
        async with self._changing:
            return await self._deploy(deployment)

    async def _deploy(self, deployment: Deployment) -> Served:
        old = self.current
        if old.deployment.same(deployment) and old.loop.works:
            await self._give_up_trying()
            old.deployment = old.deployment.told_as(deployment)
        else:
            await asyncio.to_thread(self.check_deployable, deployment)
            served = await self._load(deployment)
            await self._give_up_trying()
            self._switch(served)
            self._switched(old)
        await asyncio.to_thread(self.operation.keep, self.current.deployment)
        return self.current

    async def _load(self, deployment: Deployment) -> Served:
        """Another engine beside the current one. Raises :class:`UserError` where it cannot be."""
        try:
            return await self.current.beside(deployment)
        except (RuntimeError, OSError) as error:
            raise UserError(f"the new engine did not start: {error}") from None

    async def settle(self, deployment: Deployment) -> None:
        """Serve this and nothing beside it, as others have decided. Raises :class:`UserError` where
        that cannot be."""
        async with self._changing:
            trying = self._trying
            if trying is not None and trying.sides["challenger"].deployment.same(deployment):
                trying.end("promoted", "it is faster elsewhere")
                await self._decide(trying)
            else:
                await self._deploy(deployment)

    async def try_out(
        self, deployment: Deployment, share: float, confidence: float = CONFIDENCE
    ) -> Served:
        """Give a challenger a `share` of the traffic, until it is promoted or dropped with this
        confidence (:mod:`cluster.serving.canary`). Raises :class:`UserError` where that cannot
        be."""
        both = (self.engine.configuration, deployment.configuration)
        check_comparable(both, share)
        await asyncio.to_thread(self.check_deployable, deployment)
        async with self._changing:
            challenger = await self._load(deployment)
            await self._give_up_trying()
            challenger.loop.observer = self.observer
            self._beside.append(challenger)
            self.canary = Canary(self.current, challenger, share, confidence)
            return challenger

    async def _give_up_trying(self) -> None:
        if self._trying is not None:
            self._trying.end("dropped", "something else is deployed")
            await self._decide(self._trying)

    async def roll_back(self) -> Served:
        """Serve again what was served before; where nothing was, without a challenger beside it.
        Raises :class:`UserError` where there is none either."""
        async with self._changing:
            if self.previous is None and self._trying is None:
                raise UserError("nothing else was served before")
            if self.previous is None:
                return await self._deploy(self.current.deployment)
            return await self._deploy(await asyncio.to_thread(self.previous.as_here))

    def check_deployable(self, deployment: Deployment) -> None:
        """Raises :class:`UserError` for another target, also under the same name, as clients are
        promised this one's text, and for models that are not there."""
        served, wanted = self.current.deployment.pair.target, deployment.pair.target
        if wanted != served:
            raise UserError(
                f"this server's target is {served}, and not {wanted}: another target writes other"
                " texts and needs a server of its own"
            )
        before, after = self.current.deployment.weights, deployment.weights
        if before and after and before.get(TARGET) != after.get(TARGET):
            raise UserError(
                f"the target {served} has other weights than those that are served: another target"
                " writes other texts and needs a server of its own"
            )
        check_pair(deployment.pair)
        if deployment.configuration.asynchronous:
            raise UserError(
                f"{deployment.configuration.label} drafts on a device of its own, which a running"
                " server does not get: serve it with `specdec serve --cluster PLACEMENT` on another"
                " port, and stop this server when its clients have moved"
            )
        check_models(deployment.pair, deployment.configuration)

    @property
    def _replaceable(self) -> bool:
        return isinstance(self.engine, EngineProcess)

    def _all(self) -> Iterator[Served]:
        yield self.current
        yield from self._beside
        yield from self._draining

    def _switched(self, old: Served) -> None:
        """Another deployment has taken the place of this one."""
        # To weights that others have taken the place of there is no way back.
        if not old.deployment.named_as(self.current.deployment):
            self.previous = old.deployment
        self._broken = None
        self.switches += 1
        self._retire(old)

    def _switch(self, served: Served) -> None:
        served.loop.observer = self.observer
        self.current, self._started = served, monotonic()

    def _retire(self, served: Served) -> None:
        self._draining[served] = asyncio.create_task(self._drain(served))

    async def _watch(self) -> None:
        """Start an engine again that has died while nobody was waiting for it."""
        while self._replaceable:
            await asyncio.sleep(_WATCH)
            try:
                with suppress(EngineFailed):
                    await self.working()
            except Exception:
                logger.exception("the engine was not looked after; that is tried again")

    async def _drain(self, served: Served) -> None:
        """Let an engine finish what it has, keep what it has learned, and end it."""
        while served.loop.running and not served.loop.failure:
            await asyncio.sleep(_LOOK)
        with suppress(RuntimeError):  # its process has ended
            await served.loop.between_steps(served.keep_learned)
        served.loop.close()
        await asyncio.to_thread(served.end)
        self._cancelled += served.loop.cancelled
        del self._draining[served]
