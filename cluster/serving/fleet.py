"""The replicas of a server, and the deployment that all of them serve.

The engine of a replica is this library's, or the process of another program. A new deployment is
loaded beside the old one on every replica. Once all are ready, new requests go to the new engines;
the old ones finish their requests, and end. A deployment that a replica cannot load changes
nothing. An engine that fails is started again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Generic, Self

from cluster.placed_engine import check_models
from cluster.serving.canary import Canary, check_comparable
from cluster.serving.engine_loop import EngineFailed
from cluster.serving.replica import FleetReplica
from cluster.serving.served import NOT_OPERATED, Deployment, Operation, S, run_as
from specdec_core.base.errors import UserError
from specdec_core.models.fingerprints import TARGET
from specdec_core.models.pair import check_pair

logger = logging.getLogger(__name__)

_WATCH = 1.0  # seconds between checks of a replica


class Fleet(Generic[S]):
    """The replicas of a server, with their first engines `served`. Use as `async with`."""

    def __init__(self, served: Sequence[S], operation: Operation = NOT_OPERATED) -> None:
        self.replicas = [FleetReplica(str(number), each) for number, each in enumerate(served)]
        self.deployment, self.operation = served[0].deployment, operation
        self.previous: Deployment | None = None  # to which a rollback returns
        self.switches = self.restarts = 0  # restarts of engines that failed
        self.canary: Canary | None = None  # the last one
        self._changing = asyncio.Lock()  # held while what is served is changed
        self._loading: set[asyncio.Task[None]] = set()  # replicas that load what is served
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for replica in self.replicas:
            self.repeat(_WATCH, partial(self.watch, replica))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for replica in self.replicas:
            await replica.close()

    def end(self) -> None:
        """End the engines, side by side, and give back their devices."""
        engines = [served for replica in self.replicas for served in replica.engines()]
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(lambda served: served.end(at_once=True), engines))
        for replica in self.replicas:
            replica.served.host.close()

    def repeat(self, seconds: float, call: Callable[[], Awaitable[None]]) -> None:
        """Call again and again, as :func:`every` does, until the fleet is left."""
        self._tasks.append(asyncio.create_task(every(seconds, call)))

    @property
    def working(self) -> list[S]:
        """The engines that take new requests, without challengers."""
        return [served for each in self.replicas if (served := each.side("champion"))]

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
        return any(each.served.accepting and not each.failure for each in self.replicas)

    @property
    def failure(self) -> EngineFailed | None:
        """Why no engine can be started, where none works."""
        failures = [replica.failure for replica in self.replicas]
        return failures[0] if all(failures) else None

    def check(self) -> None:
        """Raises :class:`EngineFailed` where the whole server is to be started again: no engine
        works, and none can be started. Other programs' servers are always tried again here."""
        if (failure := self.failure) and not self._elsewhere:
            raise failure

    # Engines that fail.

    def _restart(self, replica: FleetReplica[S]) -> asyncio.Task[FleetReplica[S]]:
        """Start the engine of a replica again, unless that is under way or it works."""
        if replica.restarting is None or replica.restarting.done():
            replica.restarting = asyncio.create_task(self._restarted(replica))
            replica.restarting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return replica.restarting

    async def _restarted(self, replica: FleetReplica[S]) -> FleetReplica[S]:
        old = replica.served
        replica.count_failure()
        await asyncio.sleep(replica.pause)
        try:
            # Without the lock: the devices of a lost node may never be there again.
            await old.host.wait()
            async with self._changing:
                if replica.served is not old or self._current(replica):
                    return replica
                loading = asyncio.create_task(self._load_again(replica))
                self._loading.add(loading)
                loading.add_done_callback(self._loading.discard)
            await loading  # several replicas load side by side
            return replica
        except (UserError, RuntimeError, OSError) as error:
            replica.failure = EngineFailed(f"the engine failed, and cannot be started: {error}")
            logger.error("replica %s: %s", replica.name, replica.failure)
            raise replica.failure from None

    async def _load_again(self, replica: FleetReplica[S]) -> None:
        """Start another engine for a replica whose engine failed, or serves another configuration
        than the fleet does."""
        old, failure = replica.served, replica.served.failure
        if failure:
            logger.warning("replica %s is started again: %s", replica.name, failure)
        served = await old.beside(await asyncio.to_thread(self.deployment.as_here))
        if failure:
            served.since = old.since
            replica.restarts += 1
            self.restarts += 1
        self.deployment = served.deployment
        replica.switch(served)
        if self._trying is not None:
            self._trying.sides["champion"] = [each.served for each in self.replicas]

    def _current(self, replica: FleetReplica[S]) -> bool:
        """Whether its engine works, by the configuration that all replicas serve."""
        served = replica.side("champion")
        return served is not None and served.deployment.named_as(self.deployment)

    async def watch(self, replica: FleetReplica[S]) -> None:
        """Start an engine again that has failed while no request waited for it, and load what is
        served where a canary was not."""
        if not (await replica.served.probe() and self._current(replica)):
            self._restart(replica)

    # What is served.

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """What is served can be changed here: no replica is loading it."""
        async with self._changing:
            if self._loading:
                await asyncio.wait(self._loading)
            yield

    async def deploy(self, deployment: Deployment) -> Deployment:
        """Serve this from now on, and nothing beside it. What is served already, with the same
        weights, is not loaded again. Raises :class:`UserError` where a replica cannot serve it;
        then everything stays unchanged."""
        async with self._alone():
            return await self._deploy(deployment)

    async def roll_back(self) -> Deployment:
        """Serve again what was served before, or, where nothing was, end a canary. Raises
        :class:`UserError` where there is none either."""
        async with self._alone():
            if self.previous is None and self._trying is None:
                raise UserError("nothing else was served before")
            if self.previous is None:
                return await self._deploy(self.deployment)
            return await self._deploy(await asyncio.to_thread(self.previous.as_here))

    async def try_out(self, deployment: Deployment, share: float) -> Deployment:
        """Give a challenger a `share` of the traffic, until it is promoted or dropped
        (:mod:`cluster.serving.canary`). Raises :class:`UserError` where that cannot be."""
        if self._elsewhere:
            raise UserError(
                "a canary compares engines of this library: deploy the configuration, and go back"
                " with `specdec deploy --back`"
            )
        check_comparable((self.deployment.configuration, deployment.configuration), share)
        deployment = self._run_here(deployment)
        await asyncio.to_thread(check_deployable, self.deployment, deployment)
        async with self._alone():
            loaded = await self._load(deployment)
            await self._drop_challenger()
            for replica, challenger in loaded.items():
                replica.challenger = challenger
            champions = [replica.served for replica in loaded]
            self.canary = Canary(champions, [*loaded.values()], share)
            return deployment

    async def _deploy(self, deployment: Deployment) -> Deployment:
        deployment = self._run_here(deployment)
        served = [replica.side("champion") for replica in self.replicas]
        if all(each is not None and each.deployment.same(deployment) for each in served):
            await self._drop_challenger()
            said = deployment.model_dump(include={"source", "version", "certificate"})
            described = self.deployment.model_copy(update=said)
            for replica in self.replicas:
                await asyncio.to_thread(replica.served.describe, described)
            self.deployment = self.replicas[0].served.deployment
        else:
            await asyncio.to_thread(check_deployable, self.deployment, deployment, self._elsewhere)
            loaded = await self._load(deployment)
            await self._drop_challenger()
            self._switch(loaded)
        await asyncio.to_thread(self.operation.keep, self.deployment)
        return self.deployment

    def _run_here(self, deployment: Deployment) -> Deployment:
        """The same as this server runs it: see :func:`run_as`. One that was started fresh learns
        nothing that lasts."""
        pair, fresh = run_as(self.deployment.pair, deployment.pair), self.deployment.fresh
        learned = None if fresh else deployment.learned
        return deployment.model_copy(update={"pair": pair, "fresh": fresh, "learned": learned})

    @property
    def _elsewhere(self) -> bool:
        """Whether another program runs the target."""
        return self.replicas[0].served.elsewhere

    async def _load(self, deployment: Deployment) -> dict[FleetReplica[S], S]:
        """Another engine beside that of each replica that works. Raises :class:`UserError` where
        one cannot be loaded; then none remains."""
        replicas = [each for each in self.replicas if each.side("champion")] or self.replicas
        # A task that is cancelled ends the engine that it loads.
        loading = [asyncio.create_task(each.served.beside(deployment)) for each in replicas]
        try:
            found = await asyncio.gather(*loading, return_exceptions=True)
        except asyncio.CancelledError:
            # By now every task is done. One that was done before keeps its engine.
            ended = [task for task in loading if not (task.cancelled() or task.exception())]
            await asyncio.gather(*(task.result().finish() for task in ended))
            raise
        loaded = [each for each in found if not isinstance(each, BaseException)]
        if len(loaded) == len(replicas):
            return dict(zip(replicas, loaded, strict=True))
        await asyncio.gather(*(served.finish() for served in loaded))
        error = next(each for each in found if isinstance(each, BaseException))
        if isinstance(error, UserError):
            raise error
        raise UserError(f"the new engine did not start: {error}") from None

    def _switch(self, loaded: dict[FleetReplica[S], S]) -> None:
        """Decode new requests by these engines."""
        before = self.deployment
        for replica, served in loaded.items():
            replica.switch(served)
            self.deployment = served.deployment
        # Weights that were overwritten under the same names cannot be returned to.
        if not before.named_as(self.deployment):
            self.previous = before
        self.switches += 1

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
