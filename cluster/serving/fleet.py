"""The replicas of a server, and the deployment that all of them serve.

A request goes to one replica, and is continued by another engine where its engine fails. A new
deployment is loaded beside the old one on every replica. Once all are ready, new requests go to the
new engines; the old ones finish their requests, and end. A deployment that a replica cannot load
changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from cluster.placed_engine import check_models
from cluster.serving.canary import Canary, Side, check_comparable
from cluster.serving.engine_loop import EngineFailed, LoopObserver, QueueFull, Submission
from cluster.serving.engine_process import EngineProcess
from cluster.serving.prefixes import Prefixes, Reason
from cluster.serving.replica import EngineReplica
from cluster.serving.served import NOT_OPERATED, Deployment, Operation, Served
from cluster.serving.stream import Stream
from specdec_core.base.errors import UserError
from specdec_core.engine import Request
from specdec_core.models.fingerprints import TARGET
from specdec_core.models.pair import check_pair
from specdec_core.tokens.statistics import Generation

logger = logging.getLogger(__name__)

_WATCH = 1.0  # seconds between checks of the replicas
_SHARE = 30.0  # seconds between exchanges of what their bandits have learned
KEEP = 60.0  # seconds between copies of what was learned


class Fleet:
    """Answers requests by the engines of its replicas; `served` has the first engine of each. Use
    as `async with`."""

    def __init__(self, served: Sequence[Served], operation: Operation = NOT_OPERATED) -> None:
        self.replicas = [EngineReplica(str(number), each) for number, each in enumerate(served)]
        self.deployment, self.operation = served[0].deployment, operation
        self.previous: Deployment | None = None  # to which a rollback returns
        self.switches = self.resumed = self.restarts = 0  # restarts of engines that failed
        self.routed: Counter[Reason] = Counter({"prefix": 0, "busy": 0, "load": 0})
        self.canary: Canary | None = None  # the last one
        self.observer = LoopObserver()
        self._changing = asyncio.Lock()
        self._prefixes = Prefixes(served[0].loop.engine.slots)

    def observe(self, observer: LoopObserver) -> None:
        """Have `observer` follow the requests of all engines."""
        self.observer = observer
        for replica in self.replicas:
            for served in replica.engines():
                served.loop.observer = observer

    async def __aenter__(self) -> Fleet:
        for replica in self.replicas:
            replica.served.loop.open()
        self._tasks = [
            asyncio.create_task(every(_WATCH, self._watch)),
            asyncio.create_task(every(_SHARE, self.share)),
            asyncio.create_task(every(KEEP, self.keep_learned)),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for replica in self.replicas:
            replica.close()

    def end(self) -> None:
        """Save what was learned, and end the engines' processes."""
        with suppress(RuntimeError):  # its process has ended
            self._learner.keep_learned()
        for replica in self.replicas:
            replica.served.end()
            replica.served.loop.engine.host.close()  # it gives back the devices

    @property
    def engine(self) -> EngineProcess:
        """The engine of the first replica; all replicas have equal engines."""
        return self.replicas[0].served.loop.engine

    @property
    def running(self) -> int:
        """Requests that are waiting or being decoded."""
        return sum(replica.running for replica in self.replicas)

    @property
    def waiting(self) -> int:
        """Requests that have no slot."""
        return sum(replica.waiting for replica in self.replicas)

    @property
    def cancelled(self) -> int:
        """Submissions given up by their clients."""
        return sum(replica.cancelled for replica in self.replicas)

    @property
    def accepting(self) -> bool:
        """Whether a request that comes now is answered without waiting for another engine."""
        return any(
            replica.side("champion") and not replica.failure and not replica.served.loop.full
            for replica in self.replicas
        )

    @property
    def failure(self) -> EngineFailed | None:
        """Why no engine can be started, where none works."""
        failures = [replica.failure for replica in self.replicas]
        return failures[0] if all(failures) else None

    def check(self) -> None:
        """Raises :class:`EngineFailed` where no engine works and none can be started."""
        if failure := self.failure:
            raise failure

    # Requests.

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

    async def _resume(
        self, failed: Served, requests: Sequence[Request]
    ) -> tuple[Served, Submission]:
        """Hand requests that an engine has begun to another one. Raises :class:`EngineFailed`."""
        self.resumed += len(requests)
        return await self._hand(requests, "champion", begun=True)

    async def _hand(
        self, requests: Sequence[Request], side: Side, begun: bool = False
    ) -> tuple[Served, Submission]:
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
                if side == "champion" or all(c.loop.works for c in canary.sides[side]):
                    return side
                canary.end("dropped", "its engine has failed")
        if not self._changing.locked():
            async with self._changing:
                await self._decide(canary)
        return "champion"

    def _ended(self, request_id: str, generation: Generation | None) -> None:
        """A request has ended, or was given up."""
        if self._trying is not None:
            self._trying.ended(request_id, generation)

    # Engines that fail.

    async def _revived(self, begun: bool) -> EngineReplica:
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

    def _restart(self, replica: EngineReplica) -> asyncio.Task[EngineReplica]:
        """Start the engine of a replica again, unless that is under way or it works."""
        if replica.restarting is None or replica.restarting.done():
            replica.restarting = asyncio.create_task(self._restarted(replica))
            replica.restarting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return replica.restarting

    async def _restarted(self, replica: EngineReplica) -> EngineReplica:
        old = replica.served
        failed = not old.loop.works
        replica.count_failure()
        await asyncio.sleep(replica.pause)
        try:
            # Without the lock: the devices of a lost node may never be there again.
            await asyncio.to_thread(old.loop.engine.host.wait)
            async with self._changing:
                if replica.served is not old or self._current(replica):
                    return replica
                if failed:
                    logger.warning("the engine has failed and is started again")
                deployment = await asyncio.to_thread(self.deployment.as_here)
                served = await old.beside(deployment)
                served.loop.observer = self.observer
                if failed:
                    served.since = old.since
                    replica.restarts += 1
                    self.restarts += 1
                self.deployment = deployment
                replica.switch(served)
                if self._trying is not None:
                    self._trying.sides["champion"] = [each.served for each in self.replicas]
                return replica
        except (UserError, RuntimeError, OSError) as error:
            replica.failure = EngineFailed(f"the engine failed, and cannot be started: {error}")
            raise replica.failure from None

    def _current(self, replica: EngineReplica) -> bool:
        """Whether its engine works, by the configuration that all replicas serve."""
        served = replica.side("champion")
        return served is not None and served.deployment.named_as(self.deployment)

    async def _watch(self) -> None:
        """Start engines again that have failed while no request waited for them, and load what is
        served where a canary was not."""
        for replica in self.replicas:
            if not self._current(replica):
                self._restart(replica)

    # What is served.

    async def deploy(self, deployment: Deployment) -> Deployment:
        """Serve this from now on, and nothing beside it. What is served already, with the same
        weights, is not loaded again. Raises :class:`UserError` where a replica cannot serve it;
        then everything stays unchanged."""
        async with self._changing:
            return await self._deploy(deployment)

    async def roll_back(self) -> Deployment:
        """Serve again what was served before, or, where nothing was, end a canary. Raises
        :class:`UserError` where there is none either."""
        async with self._changing:
            if self.previous is None and self._trying is None:
                raise UserError("nothing else was served before")
            if self.previous is None:
                return await self._deploy(self.deployment)
            return await self._deploy(await asyncio.to_thread(self.previous.as_here))

    async def try_out(self, deployment: Deployment, share: float) -> Deployment:
        """Give a challenger a `share` of the traffic, until it is promoted or dropped
        (:mod:`cluster.serving.canary`). Raises :class:`UserError` where that cannot be."""
        check_comparable((self.deployment.configuration, deployment.configuration), share)
        await asyncio.to_thread(check_deployable, self.deployment, deployment)
        async with self._changing:
            loaded = await self._load(deployment)
            await self._drop_challenger()
            for replica, challenger in loaded.items():
                replica.challenger = challenger
            champions = [replica.served for replica in loaded]
            self.canary = Canary(champions, [*loaded.values()], share)
            return deployment

    async def _deploy(self, deployment: Deployment) -> Deployment:
        served = [replica.side("champion") for replica in self.replicas]
        if all(each is not None and each.deployment.same(deployment) for each in served):
            await self._drop_challenger()
            self._describe(self.deployment.described_as(deployment))
        else:
            await asyncio.to_thread(check_deployable, self.deployment, deployment)
            loaded = await self._load(deployment)
            await self._drop_challenger()
            self._switch(loaded)
        await asyncio.to_thread(self.operation.keep, self.deployment)
        return self.deployment

    async def _load(self, deployment: Deployment) -> dict[EngineReplica, Served]:
        """Another engine beside that of each replica that works. Raises :class:`UserError` where
        one cannot be loaded; then none remains."""
        replicas = [each for each in self.replicas if each.side("champion")] or self.replicas
        # A task that is cancelled ends the engine that it has loaded.
        loading = [asyncio.create_task(each.served.beside(deployment)) for each in replicas]
        try:
            found = await asyncio.gather(*loading, return_exceptions=True)
        except asyncio.CancelledError:
            for task in loading:
                task.cancel()
            raise
        loaded = [each for each in found if isinstance(each, Served)]
        if len(loaded) == len(replicas):
            for served in loaded:
                served.loop.observer = self.observer
            return dict(zip(replicas, loaded, strict=True))
        for served in loaded:
            served.loop.close()
            await asyncio.to_thread(served.end)
        error = next(each for each in found if isinstance(each, BaseException))
        if isinstance(error, UserError):
            raise error
        raise UserError(f"the new engine did not start: {error}") from None

    def _switch(self, loaded: dict[EngineReplica, Served]) -> None:
        """Decode new requests by these engines."""
        before = self.deployment
        for replica, served in loaded.items():
            replica.switch(served)
            self.deployment = served.deployment
        # Weights that were overwritten under the same names cannot be returned to.
        if not before.named_as(self.deployment):
            self.previous = before
        self.switches += 1

    def _describe(self, deployment: Deployment) -> None:
        self.deployment = deployment
        for replica in self.replicas:
            replica.served.deployment = deployment

    @property
    def _trying(self) -> Canary | None:
        """The canary, while there is a challenger."""
        running = any(replica.challenger for replica in self.replicas)
        return self.canary if running else None

    async def _drop_challenger(self) -> None:
        if self._trying is not None:
            self._trying.end("dropped", "something else is deployed")
            await self._decide(self._trying)

    async def _decide(self, canary: Canary) -> None:
        """Put a promoted challenger in the champion's place, or let a dropped one end."""
        tried = {each: each.challenger for each in self.replicas if each.challenger is not None}
        if canary is not self.canary or not tried:
            return
        for replica in tried:
            if canary.state != "promoted":
                replica.retire(tried[replica])
            replica.challenger = None
        if canary.state == "promoted":
            self._switch(tried)
            await asyncio.to_thread(self.operation.keep, self.deployment)

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
        served = self._learner
        await served.loop.between_steps(served.keep_learned)

    @property
    def _learner(self) -> Served:
        """The first engine that works."""
        working = (served for each in self.replicas if (served := each.side("champion")))
        return next(working, self.replicas[0].served)


def check_deployable(served: Deployment, wanted: Deployment, elsewhere: bool = False) -> None:
    """Raises :class:`UserError` for another target, also under the same name, as clients are
    promised this target's output, and for missing models. If another program runs the target
    (`elsewhere`), its architecture is not checked."""
    target = served.pair.target
    if wanted.pair.target != target:
        raise UserError(
            f"this server's target is {target}, and not {wanted.pair.target}: another target writes"
            " other texts and needs a server of its own"
        )
    before, after = served.weights, wanted.weights
    if before and after and before.get(TARGET) != after.get(TARGET):
        raise UserError(
            f"the target {target} has other weights than those that are served: another target"
            " writes other texts and needs a server of its own"
        )
    check_pair(wanted.pair, served=elsewhere)
    if wanted.configuration.asynchronous:
        raise UserError(
            f"{wanted.configuration.label} drafts on a device of its own, which a running server"
            " does not get: serve it with `specdec serve --cluster PLACEMENT` on another port, and"
            " stop this server when its clients have moved"
        )
    check_models(wanted.pair, wanted.configuration)


async def every(seconds: float, call: Callable[[], Awaitable[None]]) -> None:
    """Call again and again, each time `seconds` after the last call has ended. A failure is
    logged."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await call()
        except Exception:
            logger.exception("a check of the replicas failed; it is tried again")
