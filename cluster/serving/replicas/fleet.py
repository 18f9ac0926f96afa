"""The ingress' side of replicas: requests go to one of them, and on to another where one dies; what
is to be served goes to all.

A request's tokens and seed are known here, so another replica can go on with it
(:mod:`cluster.serving.stream`): a text that the seed fixes stays the same, another's continuation
has the target's distribution.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from grpc.aio import AioRpcError
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from cluster.serving.canary import CONFIDENCE, check_comparable
from cluster.serving.engine_loop import EngineFailed, LoopObserver, QueueFull
from cluster.serving.protocol.models import CanaryState
from cluster.serving.replicas.messages import (
    CommandDone,
    Facts,
    Failed,
    Gain,
    Refused,
    RequestsTaken,
    Status,
)
from cluster.serving.served import Deployment, Operation
from cluster.serving.stream import ATTEMPTS, Stream
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.engine import Chunk, Request
from specdec_core.tokens.statistics import Generation

logger = logging.getLogger(__name__)

_WATCH = 1.0  # seconds between looks at what the replicas serve
_SHARE = 30.0  # and between exchanges of what their bandits have learned
_ANSWER = 10.0  # seconds in which a replica says how it is
_LOAD = 1800.0  # seconds in which it loads another engine
_LATE = object()  # in place of the answer of a replica that does not answer in time
_GONE = (RayError, RayServeException, AioRpcError)  # what a replica's death looks like


class FleetSubmission:
    """Requests that a replica has; see :class:`cluster.serving.stream.Submitted`."""

    def __init__(
        self, answer: DeploymentResponseGenerator[Any], configuration: Configuration, requests: int
    ) -> None:
        self._answer, self.configuration, self._unfinished = answer, configuration, requests

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk]]:
        try:
            async for part in self._answer:
                if isinstance(part, Failed):
                    raise EngineFailed(part.message)
                if isinstance(part, RequestsTaken):
                    self.configuration = part.configuration
                    continue
                index, chunk = part
                self._unfinished -= chunk.finished is not None
                yield index, chunk
        except _GONE as error:
            raise EngineFailed(f"a replica is gone: {error!r}") from None
        if self._unfinished:
            raise EngineFailed("a replica has ended before its answer")

    def close(self) -> None:
        """Cancel the requests that are not finished."""
        if self._unfinished:
            self._answer.cancel()

    __del__ = close


class Fleet:
    """The replicas behind a handle, and the deployment that all of them serve."""

    def __init__(
        self, engines: DeploymentHandle[Any], deployment: Deployment, operation: Operation
    ) -> None:
        # By gRPC a message takes half the CPU time of an object of Ray's.
        self._engines = engines.options(_by_reference=False)
        self.deployment, self.operation = deployment, operation
        self.previous: Deployment | None = None  # to which a rollback returns
        self.switches = self.resumed = self.refused = 0
        self.canary: CanaryState | None = None  # the last one
        self._trying: Deployment | None = None  # a challenger
        self._useless: set[tuple[str, Configuration]] = set()  # that a replica could not load
        self._changing = asyncio.Lock()
        self.observer = LoopObserver()  # the replicas count

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Replicas that start late serve what all serve, during the block."""
        tasks = [
            asyncio.create_task(_every(_WATCH, self._watch)),
            asyncio.create_task(_every(_SHARE, self._share)),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    async def facts(self) -> Facts:
        """What the engines can do, once one of them works."""
        facts: Facts = await self._engines.facts.remote()
        return facts

    async def submit(self, requests: Sequence[Request]) -> Stream[str]:
        """Hand all requests to one replica, or none.

        Raises:
            UserError: what its engine finds wrong with a request.
            QueueFull: too many are waiting, also at the least busy replica.
            EngineFailed: no replica answers.
        """
        replica, submission = await self._hand(requests, begun=False)
        return Stream(self, replica, requests, submission)

    async def go_on(self, failed: str, requests: Sequence[Request]) -> tuple[str, FleetSubmission]:
        """Hand requests that were begun to another replica. Raises :class:`EngineFailed`."""
        self.resumed += len(requests)
        return await self._hand(requests, begun=True, avoid=[failed])

    def finished(self, request_id: str, generation: Generation) -> None:
        """A request has ended."""

    def left(self, request_id: str) -> None:
        """A request was given up."""

    async def ask(self, name: str, *arguments: Any, seconds: float = _ANSWER) -> list[Any]:
        """What the replicas return that answer in time."""
        said = [answer async for answer in self._answers(name, *arguments, seconds=seconds)]
        return [answer for answer in said if answer is not _LATE]

    async def takes(self) -> bool:
        """Whether a replica takes requests that come now. The first one that does is enough."""
        async with aclosing(self._answers("status", seconds=_ANSWER)) as statuses:
            async for status in statuses:
                if status is not _LATE and status.takes:
                    return True
        return False

    async def deploy(self, deployment: Deployment) -> Deployment:
        """Have all replicas serve this from now on. Raises :class:`UserError` where one cannot;
        then all go on as before. Raises :class:`EngineFailed` where none answers."""
        async with self._changing:
            return await self._deploy(deployment)

    async def roll_back(self) -> Deployment:
        """Serve again what was served before; where nothing was, without a challenger beside it.
        Raises :class:`UserError` where there is none either."""
        async with self._changing:
            if self.previous is None and self._trying is None:
                raise UserError("nothing else was served before")
            if self.previous is None:
                return await self._deploy(self.deployment)
            return await self._deploy(await asyncio.to_thread(self.previous.as_here))

    async def try_out(self, deployment: Deployment, share: float) -> Deployment:
        """Have every replica give a challenger a share of its traffic. The first that can decide
        decides for all, so each is the more careful, the more they are. Raises
        :class:`UserError`."""
        check_comparable((self.deployment.configuration, deployment.configuration), share)
        async with self._changing:
            count = max(len(await self.ask("status")), 1)
            confidence = 1 - (1 - CONFIDENCE) / count
            await self._tell("try_out", deployment, share, confidence)
            self._trying = deployment
            await self._decide(await self.ask("status"))
            return deployment

    async def _answers(
        self, name: str, *arguments: Any, seconds: float
    ) -> AsyncGenerator[Any, None]:
        """What each replica returns, as it comes; at the end :data:`_LATE` for each that has not
        answered within so many seconds. One that has died or failed is left out.

        Each is waited for alone: Ray's `results_async` gives up what the others have said where one
        does not answer in time.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        try:
            async with asyncio.timeout_at(end):
                asked = self._engines.broadcast(name, *arguments)
                results = await asked._fetch_replica_results_async()
        except (DeploymentUnavailableError, TimeoutError):
            return
        late = {asyncio.ensure_future(result.get_async()) for result in results}
        try:
            while late:
                done, late = await asyncio.wait(
                    late, timeout=max(end - loop.time(), 0), return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for answer in done:
                    if answer.cancelled():
                        continue
                    if (error := answer.exception()) is None:
                        yield answer.result()
                    elif not isinstance(error, _GONE):
                        logger.error("a replica failed at %r", name, exc_info=error)
        finally:
            for answer in late:
                answer.cancel()
        for _ in late:
            yield _LATE

    async def _hand(
        self, requests: Sequence[Request], begun: bool, avoid: Sequence[str] = ()
    ) -> tuple[str, FleetSubmission]:
        """A replica that has taken the requests. One that is full is asked no more than once: the
        router then names the least busy of the others."""
        call = self._engines.options(method_name="answer", stream=True)
        avoided, full, failure = [*avoid], 0, "no replica answers"
        for _ in range(2 + ATTEMPTS):
            answer = call.remote([*requests], begun, avoided)
            assert isinstance(answer, DeploymentResponseGenerator)  # of a call that streams
            try:
                first = await anext(answer)
            except (*_GONE, StopAsyncIteration) as error:
                failure = f"a replica is gone: {error!r}"
                continue
            except BaseException:  # the client has left
                answer.cancel()
                raise
            if isinstance(first, RequestsTaken):
                return first.replica, FleetSubmission(answer, first.configuration, len(requests))
            assert isinstance(first, Refused)
            avoided.append(first.replica)
            if first.because == "bad":
                raise UserError(first.message)
            full += first.because == "full"
            if full > 1:
                self.refused += 1
                raise QueueFull(first.waiting, first.seconds)
            failure = first.message
        raise EngineFailed(failure)

    async def _deploy(self, deployment: Deployment) -> Deployment:
        await self._tell("deploy", deployment)
        self._served(deployment)
        await asyncio.to_thread(self.operation.keep, self.deployment)
        return self.deployment

    async def _tell(self, name: str, *arguments: Any) -> None:
        """Have all replicas do something, or none. No challenger is tried any more then, unless all
        have refused. Raises :class:`UserError`, or :class:`EngineFailed` where none answers."""
        answers = [a async for a in self._answers(name, *arguments, seconds=_LOAD)]
        late = CommandDone("", "a replica did not answer in time")
        told: list[CommandDone] = [late if answer is _LATE else answer for answer in answers]
        silent = all(answer is _LATE for answer in answers)
        errors = [each.error for each in told if each.error is not None]
        if errors and len(errors) == len(told) and not silent:
            raise UserError(errors[0])
        if errors:
            await self.ask("deploy", self.deployment, seconds=_LOAD)
        if self._trying is not None:
            self._see(await self.ask("status"))
            self._trying = None
        if silent:
            raise EngineFailed("no replica answers")
        if errors:
            raise UserError(errors[0])

    def _served(self, deployment: Deployment) -> None:
        if self.deployment.same(deployment):
            self.deployment = self.deployment.told_as(deployment)
            return
        # To weights that others have taken the place of there is no way back.
        if not self.deployment.named_as(deployment):
            self.previous = self.deployment
        self.deployment = deployment
        self.switches += 1

    async def _watch(self) -> None:
        """Decide about a challenger, and tell replicas that have come what to serve."""
        async with self._changing:
            statuses: list[Status] = await self.ask("status")
            await self._decide(statuses)
            await self._tell_strays(statuses)

    async def _share(self) -> None:
        """Have every replica learn what the others have learned."""
        drafter = self.deployment.configuration.drafter
        if drafter is None or not drafter.keeps_state:
            return
        gains: list[Gain] = await self.ask("gained")
        if len(gains) > 1:
            await self.ask("absorb", gains)

    async def _decide(self, statuses: Sequence[Status]) -> None:
        """Follow the first replica that has decided about the challenger."""
        if self._trying is None or not statuses:
            return
        self._see(statuses)
        state = "dropped" if self.canary is None else self.canary.state
        if state == "running":
            return
        trying, self._trying = self._trying, None
        if state == "promoted":
            self._served(trying)
            await asyncio.to_thread(self.operation.keep, self.deployment)
        await self.ask("deploy", self.deployment, seconds=_LOAD)

    def _see(self, statuses: Sequence[Status]) -> None:
        """How the challenger stands: as the first replica has decided, or as the one says that has
        compared most."""
        states = [each.canary for each in statuses if each.canary is not None]
        decided = [state for state in states if state.state != "running"]
        if states:
            self.canary = (decided or sorted(states, key=lambda state: -state.pairs))[0]
        elif self.canary is not None:  # the replicas were started again
            gone = {"state": "dropped", "reason": "the replicas that had it are gone"}
            self.canary = self.canary.model_copy(update=gone)

    async def _tell_strays(self, statuses: Sequence[Status]) -> None:
        """Replicas that started meanwhile serve what was deployed when they started."""
        configuration = self.deployment.configuration
        strays = [
            each.replica
            for each in statuses
            if not each.deployment.same(self.deployment)
            and (each.replica, configuration) not in self._useless
        ]
        if not strays or self._trying is not None:
            return
        for told in await self.ask("deploy", self.deployment, seconds=_LOAD):
            if told.error is not None:
                self._useless.add((told.replica, configuration))
                logger.error("replica %s: %s", told.replica, told.error)


async def _every(seconds: float, call: Callable[[], Awaitable[None]]) -> None:
    """Call it again and again, as long after its end. One failure is not the last time."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await call()
        except Exception:
            logger.exception("the replicas were not looked after; that is tried again")
