"""The service that the routes share, and the service of one engine."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from cluster.serving.engine_loop import QUEUE, EngineFailed, EngineLoop, QueueFull
from cluster.serving.engine_process import STEP, EngineProcess
from cluster.serving.http.access import EVERYBODY, Access
from cluster.serving.http.prompts import Prompts, prompts_of
from cluster.serving.http.stopping import Stopping
from cluster.serving.metrics import Metrics
from cluster.serving.protocol.errors import ApiError
from cluster.serving.protocol.models import Arm, Health
from cluster.serving.rollout import Rollout
from cluster.serving.served import NOT_OPERATED, Deployment, Operation, Served
from cluster.serving.stream import Stream
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair

logger = logging.getLogger(__name__)

_ARMS = 5.0  # seconds that an engine may take to report its bandit's arms
KEEP_SECONDS = 60  # between copies of the learned state


class Described(Protocol):
    """The properties of an engine that never change."""

    @property
    def configuration(self) -> Configuration: ...

    @property
    def pair(self) -> Pair: ...

    @property
    def max_length(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


class Service(ABC):
    """Answers requests under one model name. `access` says which requests are answered, `operation`
    how the server is operated."""

    def __init__(self, model: str, access: Access, operation: Operation) -> None:
        self.model, self.access, self.operation = model, access, operation
        self.started = int(time.time())
        self.stopping = Stopping()

    @property
    @abstractmethod
    def engine(self) -> Described:
        """The engine that new requests go to."""

    @abstractmethod
    def running(self) -> AbstractAsyncContextManager[None]:
        """Requests are answered during the block."""

    @abstractmethod
    async def health(self) -> Health:
        """Whether requests are answered, and how."""

    @abstractmethod
    async def ready(self) -> bool:
        """Whether a request that came now would be answered."""

    @abstractmethod
    async def page(self) -> tuple[bytes, str]:
        """The metrics in Prometheus' text format, and the content type."""

    @abstractmethod
    async def begin(self, requests: Sequence[Request]) -> Stream:
        """Submit requests to the engine. Raises :class:`UserError`, :class:`QueueFull` and
        :class:`EngineFailed`."""

    @abstractmethod
    async def deploy(self, deployment: Deployment, canary: float | None = None) -> Deployment:
        """Serve this from now on, or give it the share `canary` of the traffic. Raises
        :class:`UserError` and :class:`EngineFailed`."""

    @abstractmethod
    async def roll_back(self) -> Deployment:
        """Serve the previous deployment again. Raises :class:`UserError` and
        :class:`EngineFailed`."""

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
            return await self.begin(requests)
        except UserError as error:
            raise ApiError(str(error)) from None
        except EngineFailed as failed:
            logger.error("a request is refused: %s", failed)
            raise ApiError(
                "no engine answers; one is being started again",
                status=503,
                type="server_error",
                headers={"Retry-After": "10"},
            ) from None
        except QueueFull as full:
            raise ApiError(
                str(full),
                status=429,
                code="rate_limit_exceeded",
                type="rate_limit_error",
                headers={"Retry-After": str(full.seconds)},
            ) from None


class CompletionService(Service):
    """Answers requests with one engine.

    A bandit that learns over all requests starts from the file `learned`, if it exists, and saves
    its state there. While `queue` requests wait, further ones are refused. The engine's threads run
    on the CPU cores `cores`, if given. A step may take `patience` seconds.
    """

    def __init__(
        self,
        engine: Engine | EngineProcess,
        model: str,
        learned: Path | None = None,
        queue: int = QUEUE,
        cores: Sequence[int] = (),
        access: Access = EVERYBODY,
        deployment: Deployment | None = None,
        operation: Operation = NOT_OPERATED,
        patience: float = STEP,
    ) -> None:
        deployment = deployment or Deployment(
            pair=engine.pair.spec, configuration=engine.configuration, learned=learned
        )
        super().__init__(model, access, operation)
        loop = EngineLoop(engine, queue, cores, patience)
        self.loop = Rollout(Served(loop, deployment), operation)
        self.metrics = Metrics(model, self.loop)
        self.loop.observe(self.metrics)

    @property
    def engine(self) -> Engine | EngineProcess:
        return self.loop.engine

    def state(self) -> dict[str, Any] | None:
        """The drafter's state that is kept between requests."""
        return self.loop.current.state()

    def keep_learned(self) -> None:
        """Save what the drafter has learned since the last call."""
        self.loop.current.keep_learned()

    def close(self) -> None:
        """End the engine's process, if it has one."""
        self.loop.current.end()

    async def keep_learning(self) -> None:
        """Save periodically, so that a killed server loses little."""
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            try:
                await self.loop.between_steps(self.keep_learned)
            except Exception:  # the engine may just have died, and is started again
                logger.exception("what was learned was not saved; that is tried again")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.loop:
            keeping = asyncio.create_task(self.keep_learning())
            try:
                yield
            finally:
                keeping.cancel()
        self.keep_learned()
        self.close()

    async def health(self) -> Health:
        with suppress(EngineFailed):
            self.loop.check()
        served = self.loop.current
        configuration, status = self.engine.configuration, self.engine.status()
        health = Health(
            ready=self.loop.failure is None,
            model=self.model,
            configuration=configuration.id,
            label=configuration.label,
            lossless=configuration.lossless,
            slots=self.engine.slots,
            queue=self.loop.queue,
            max_length=self.engine.max_length,
            running=self.loop.running,
            waiting=self.loop.waiting,
            preemptions=status.preemptions,
            prefix_hits=status.prefix_hits,
            prefix_tokens=status.prefix_tokens,
            cancelled=self.loop.cancelled,
            chat=self.prompts.template is not None,
            since=served.since,
            source=served.deployment.told_source,
            version=served.deployment.version,
            certified=served.deployment.certificate is not None,
            certificate=served.deployment.certificate,
            switches=self.loop.switches,
            restarts=self.loop.restarts,
            drift=list(self.metrics.drift.alarms),
        )
        if self.loop.canary is not None:
            health.canary = self.loop.canary.said()
        drafter = served.loop.engine.drafter
        if drafter is not None and health.ready and not served.loop.failure:
            with suppress(TimeoutError, RuntimeError):  # it is busy with a long step, or ends
                async with asyncio.timeout(_ARMS):
                    arms = await served.loop.between_steps(drafter.learned)
                if arms is not None:
                    health.arms = [Arm(**arm) for arm in arms]
        return health

    async def ready(self) -> bool:
        return self.loop.takes

    async def page(self) -> tuple[bytes, str]:
        return self.metrics.page()

    async def begin(self, requests: Sequence[Request]) -> Stream:
        return await self.loop.submit(requests)

    async def deploy(self, deployment: Deployment, canary: float | None = None) -> Deployment:
        if canary is not None:
            return (await self.loop.try_out(deployment, canary)).deployment
        return (await self.loop.deploy(deployment)).deployment

    async def roll_back(self) -> Deployment:
        return (await self.loop.roll_back()).deployment
