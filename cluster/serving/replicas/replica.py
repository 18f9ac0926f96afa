"""A replica: an engine that answers an ingress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

from prometheus_client.metrics_core import Metric
from ray import serve

from cluster.serving.engine_loop import EngineFailed, QueueFull
from cluster.serving.keeper import end_with_parent
from cluster.serving.protocol.models import Health
from cluster.serving.replicas.messages import (
    CommandDone,
    Facts,
    Failed,
    Gain,
    Refused,
    RequestsTaken,
    Status,
)
from cluster.serving.served import NOT_OPERATED, Deployment
from cluster.serving.start import Start
from specdec_core.base.errors import UserError
from specdec_core.drafting.bandit.gains import added
from specdec_core.engine import Request


@serve.deployment(name="engines", max_constructor_retry_count=1)
class EngineReplica:
    """One engine in a process of its own. `replicas` is the most that there will be: each has its
    part of the cores."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, start: Start, replicas: int
    ) -> None:
        end_with_parent()
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        deployment = start.deployment()
        place = context.rank.local_rank % replicas
        count = len(start.cores) // replicas
        own = replace(
            start,
            pair=deployment.pair,
            configuration=deployment.configuration,
            cores=start.cores[place * count : (place + 1) * count],
            source=deployment.source,
            version=deployment.version,
            certificate=deployment.certificate,
            learned=deployment.learned,
            weights=deployment.weights,
            operation=NOT_OPERATED,  # the ingress is
        )
        self._stack = AsyncExitStack()
        devices = self._stack.enter_context(ExitStack())
        self._service = await asyncio.to_thread(own.service, devices)
        await self._stack.enter_async_context(self._service.running())

    async def __del__(self) -> None:
        if hasattr(self, "_stack"):  # else it did not start
            await self._stack.aclose()

    def check_health(self) -> None:
        """Ray Serve replaces a replica whose engine failed."""
        self._service.loop.check()

    def facts(self) -> Facts:
        """What its engine can do."""
        engine = self._service.engine
        return Facts(engine.pair.spec, engine.max_length, engine.vocab_size)

    async def answer(
        self, requests: Sequence[Request], begun: bool, avoid: Sequence[str]
    ) -> AsyncIterator[Any]:
        """:class:`RequestsTaken`, and (index of the request, chunk) as they come; :class:`Refused`
        otherwise. Requests that were `begun` by another replica do not queue again. `avoid` is for
        the router."""
        try:
            stream = await self._service.loop.submit(requests, begun)
        except UserError as error:
            yield Refused(self._name, "bad", str(error))
            return
        except QueueFull as full:
            yield Refused(self._name, "full", str(full), full.waiting, full.seconds)
            return
        except EngineFailed as error:
            yield Refused(self._name, "failed", str(error))
            return
        with closing(stream):
            told = stream.configuration
            yield RequestsTaken(self._name, told)
            try:
                async for part in stream:
                    if stream.configuration is not told:  # another engine goes on
                        told = stream.configuration
                        yield RequestsTaken(self._name, told)
                    yield part
            except EngineFailed as error:
                yield Failed(str(error))

    async def health(self) -> tuple[str, Health]:
        """What it says of itself."""
        return self._name, await self._service.health()

    def metrics(self) -> tuple[str, list[Metric]]:
        """What it counts."""
        return self._name, [*self._service.metrics.registry.collect()]

    def status(self) -> Status:
        """What it serves."""
        loop = self._service.loop
        canary = None if loop.canary is None else loop.canary.said()
        return Status(self._name, loop.current.deployment, loop.takes, canary)

    async def deploy(self, deployment: Deployment) -> CommandDone:
        """Serve this from now on, and nothing beside it."""
        try:
            await self._service.loop.settle(deployment)
        except UserError as error:
            return CommandDone(self._name, str(error))
        return CommandDone(self._name)

    async def try_out(self, deployment: Deployment, share: float, confidence: float) -> CommandDone:
        """Give a challenger a share of the traffic."""
        try:
            await self._service.loop.try_out(deployment, share, confidence)
        except UserError as error:
            return CommandDone(self._name, str(error))
        return CommandDone(self._name)

    async def gained(self) -> Gain:
        """What its bandit has learned since this was asked last."""
        served = self._service.loop.current
        sums = await served.loop.between_steps(served.gained)
        return Gain(self._name, served.deployment.configuration, sums)

    async def absorb(self, gains: Sequence[Gain]) -> None:
        """Learn what the others' bandits have learned."""
        served = self._service.loop.current
        sums = [
            gain.sums
            for gain in gains
            if gain.sums is not None
            and gain.replica != self._name
            and gain.configuration == served.deployment.configuration
        ]
        if sums:
            await served.loop.between_steps(partial(served.absorb, added(sums)))
