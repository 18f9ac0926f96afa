"""What the routes share: the replicas of a fleet, under one model name."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Generic, TypeVar

from cluster.serving.drift import Drift
from cluster.serving.engine_fleet import EngineFleet
from cluster.serving.engine_loop import EngineFailed, QueueFull
from cluster.serving.engine_process import EngineProcess
from cluster.serving.fleet import Fleet
from cluster.serving.http.access import EVERYBODY, Access
from cluster.serving.http.prompts import Prompts, prompts_of
from cluster.serving.http.samples import WRITE_SECONDS, Samples
from cluster.serving.http.stopping import Stopping
from cluster.serving.metrics import Metrics
from cluster.serving.protocol.errors import ApiError, rate_limited, unavailable
from cluster.serving.protocol.models import Arm, Health, ReplicaHealth
from cluster.serving.replica import FleetReplica
from cluster.serving.served import ServedEngine
from cluster.serving.stream import Stream
from specdec_core.base.errors import UserError
from specdec_core.engine import Request

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Fleet[Any])

_RESTART = 10  # seconds in which an engine may have started again
_ARMS = 5.0  # seconds in which an engine reports what its bandit has learned


class FleetService(ABC, Generic[F]):
    """Answers requests by a fleet. `access` has the clients that are answered, and their limits."""

    drift: Drift

    def __init__(self, fleet: F, model: str, access: Access) -> None:
        self.fleet, self.model, self.access = fleet, model, access
        self.started = int(time.time())
        self.stopping = Stopping()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Requests are answered during the block. At its end the engines end."""
        async with self.fleet:
            yield
        await asyncio.to_thread(self.fleet.end)

    @abstractmethod
    async def health(self) -> Health:
        """Whether requests are answered, and how."""

    def _health(self, **more: Any) -> Health:
        """The same, with what the fleet knows of it."""
        fleet = self.fleet
        return Health(
            **fleet.deployment.public,
            model=self.model,
            running=fleet.running,
            waiting=fleet.waiting,
            cancelled=fleet.cancelled,
            since=max(replica.served.since for replica in fleet.replicas),
            switches=fleet.switches,
            restarts=fleet.restarts,
            drift=list(self.drift.alarms),
            **more,
        )


class Service(FleetService[EngineFleet]):
    """Answers requests by this library's engines."""

    def __init__(self, fleet: EngineFleet, model: str, access: Access = EVERYBODY) -> None:
        super().__init__(fleet, model, access)
        self.samples: Samples | None = None
        self.metrics = Metrics(model, fleet)
        self.drift = self.metrics.drift
        fleet.observe(self.metrics)

    @property
    def engine(self) -> EngineProcess:
        """One of the engines, which are alike in all replicas."""
        return self.fleet.replicas[0].served.loop.engine

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with super().running(), AsyncExitStack() as ending:
            if self.samples is not None:
                self.fleet.repeat(WRITE_SECONDS, self.samples.write)
                ending.push_async_callback(self.samples.finish)
            yield

    @property
    def prompts(self) -> Prompts:
        """Turns texts and chats into the model's tokens."""
        return prompts_of(self.engine.pair.tokenizer)

    def check_model(self, name: str | None) -> None:
        """Raises :class:`ApiError` (404) for a model that is not served here."""
        if name not in (None, self.model):
            raise ApiError(
                f"the model {name!r} does not exist; {self.model!r} is served here",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def submit(self, requests: Sequence[Request]) -> Stream:
        """Submit requests to the engine. Raises :class:`ApiError`."""
        try:
            return await self.fleet.submit(requests)
        except UserError as error:
            raise ApiError(str(error)) from None
        except EngineFailed as failed:
            logger.error("a request is refused: %s", failed)
            raise unavailable("no engine answers; one is being started again", _RESTART) from None
        except QueueFull as full:
            raise rate_limited(str(full), full.seconds) from None

    async def health(self) -> Health:
        fleet = self.fleet
        statuses = [each.served.loop.engine.status() for each in fleet.replicas]
        health = self._health(
            ready=fleet.failure is None,
            slots=self.engine.slots * len(fleet.replicas),
            queue=sum(each.served.loop.queue for each in fleet.replicas),
            max_length=self.engine.max_length,
            preemptions=sum(status.preemptions for status in statuses),
            prefix_hits=sum(status.prefix_hits for status in statuses),
            prefix_tokens=sum(status.prefix_tokens for status in statuses),
            chat=self.prompts.template is not None,
        )
        if fleet.canary is not None:
            health.canary = fleet.canary.status()
        if len(fleet.replicas) > 1:
            health.replicas = [_replica_health(each) for each in fleet.replicas]
        if (arms := await self._arms()) is not None:
            health.arms = arms
        return health

    async def _arms(self) -> list[Arm] | None:
        """What the bandit knows that has learned most."""
        found = await asyncio.gather(*map(_learned, self.fleet.working))
        known = [arms for arms in found if arms is not None]
        return max(known, key=lambda arms: sum(arm.rounds for arm in arms), default=None)


async def _learned(served: ServedEngine) -> list[Arm] | None:
    """What a bandit has learned; None where there is none, or its engine is busy with a long
    step."""
    if (learned := served.loop.engine.learned) is None:
        return None
    with suppress(TimeoutError, RuntimeError):
        async with asyncio.timeout(_ARMS):
            rows = await served.loop.between_steps(learned.rows)
        return [Arm(**row) for row in rows]
    return None


def _replica_health(replica: FleetReplica[ServedEngine]) -> ReplicaHealth:
    engine = replica.served.loop.engine
    return ReplicaHealth(
        replica=replica.name,
        ready=not replica.failure,
        configuration=engine.configuration.id,
        running=replica.running,
        waiting=replica.waiting,
        restarts=replica.restarts,
        prefix_hits=engine.status().prefix_hits,
    )
