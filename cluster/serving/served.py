"""What is served: a configuration, the engine that decodes by it, and what its drafter learns."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, Self, TypeVar

from cluster.serving.engine_loop import EngineFailed, EngineLoop
from cluster.serving.engine_process import HERE
from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.base.workspace import workspace
from specdec_core.config import Configuration, PairSpec, Value, parse_json
from specdec_core.drafting.states import STATES, load_state, save_state
from specdec_core.drafting.trained import weights_here

logger = logging.getLogger(__name__)


class Deployment(Value):
    """A configuration to serve.

    Args:
        source: where it comes from, in words.
        version: of the pair's registered model, if it is registered.
        certificate: the statement of its certificate, if it has one.
        learned: the file of its drafter's state, if that learns while it is served.
        weights: digests of its weights (:func:`weights_here`); None where they are not known.
        fresh: whether its server neither uses nor keeps what is learned while serving.
    """

    pair: PairSpec
    configuration: Configuration
    source: str = ""
    version: int | None = None
    certificate: str | None = None
    learned: Path | None = None
    weights: dict[str, str] | None = None
    fresh: bool = False

    @property
    def public(self) -> dict[str, Any]:
        """What clients may read of it, by the names of `/health`."""
        return {
            "configuration": self.configuration.id,
            "label": self.configuration.label,
            "lossless": self.configuration.lossless,
            "source": Path(self.source).name,  # of a file, without the server's folders
            "version": self.version,
            "certified": self.certificate is not None,
            "certificate": self.certificate,
        }

    def named_as(self, other: Deployment) -> bool:
        """Whether both have the same names, whatever weights are under these."""
        return (self.pair, self.configuration) == (other.pair, other.configuration)

    def same(self, other: Deployment) -> bool:
        """Whether an engine decodes both alike. Unknown weights are not compared."""
        unknown = self.weights is None or other.weights is None
        return self.named_as(other) and (unknown or self.weights == other.weights)

    def received(self) -> Deployment:
        """This deployment by a client that may be on another machine: with this one's weights, and
        its file of what is learned."""
        here = self.as_here()
        if here.learned is None:
            return here
        return here.model_copy(update={"learned": learned_file(self.pair, self.configuration)})

    def as_here(self) -> Deployment:
        """This deployment with the weights that are here now. A certificate for other weights does
        not hold for them."""
        here = weights_here(self.pair, [self.configuration])
        if here is None or here == self.weights:
            return self
        certificate = self.certificate if self.weights is None else None
        return self.model_copy(update={"weights": here, "certificate": certificate})


def learned_file(pair: PairSpec, configuration: Configuration) -> Path:
    """Where this machine keeps what is learned while a pair is served by a configuration."""
    return workspace() / STATES / f"serve-{pair.name}-{configuration.id}.json"


def run_as(own: PairSpec, pair: PairSpec) -> PairSpec:
    """`pair` with what clients were promised, and what the machine has, where `own` is served: the
    context's length, the target's data type, the device and the threads."""
    kept = ("device", "target_dtype", "max_length", "threads")
    return pair.with_runner(**{name: getattr(own.runner, name) for name in kept})


class Operation(NamedTuple):
    """How a server is operated while it runs: the token that operators need, and the file of the
    last deployment, for a server that Ray Serve starts again."""

    token: str | None = None
    deployed: Path | None = None

    def last(self) -> Deployment | None:
        """The last deployment, if there was any."""
        if self.deployed is None or not self.deployed.exists():
            return None
        return parse_json(Deployment, self.deployed.read_bytes(), str(self.deployed))

    def keep(self, deployment: Deployment) -> None:
        """Remember what is served now. A failure to write it does not affect what is served."""
        if self.deployed is None:
            return
        try:
            write_atomically(self.deployed, deployment.model_dump_json())
        except OSError as error:
            logger.error("what is served now is not remembered: %s", error)


NOT_OPERATED = Operation()


class Served(ABC):
    """A deployment at work in an engine of a replica: this library's, or another program's server.
    It is ended by :meth:`finish`, or by :meth:`close` and then :meth:`end`."""

    elsewhere = False  # whether another program runs the target
    host = HERE  # where its process is started

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.since = int(time.time())

    @property
    @abstractmethod
    def failure(self) -> EngineFailed | None:
        """Why it does not work; None while it works."""

    @property
    def works(self) -> bool:
        return self.failure is None

    @property
    def accepting(self) -> bool:
        """Whether it takes a request that comes now."""
        return self.works

    @property
    @abstractmethod
    def running(self) -> int:
        """Requests that are waiting or being decoded."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Requests that have no slot."""

    @property
    def cancelled(self) -> int:
        """Submissions given up by their clients, as far as they are counted."""
        return 0

    async def probe(self) -> bool:
        """Whether it works, where need be by asking it."""
        return self.works

    @abstractmethod
    async def beside(self, deployment: Deployment) -> Self:
        """Another deployment in an engine beside this one, with the same slots, queue and cores.
        If this is cancelled, that engine ends.

        Raises:
            UserError: the engine cannot be replaced, or the other deployment cannot be used.
        """

    def describe(self, deployment: Deployment) -> None:
        """`deployment` is served already: take its source, version and certificate."""
        self.deployment = deployment

    async def finish(self) -> None:
        """End, once there are no requests."""
        await self.close()
        await asyncio.to_thread(self.end)

    @abstractmethod
    async def close(self) -> None:
        """Decode no more."""

    @abstractmethod
    def end(self, at_once: bool = False) -> None:
        """End the engine's process; another program's server gets less time `at_once`. Ending
        twice does nothing."""


S = TypeVar("S", bound=Served)


class ServedEngine(Served):
    """A deployment in the loop of its engine. A bandit with memory of all requests starts from its
    saved state."""

    def __init__(self, loop: EngineLoop, deployment: Deployment) -> None:
        super().__init__(deployment)
        self.loop, self.host = loop, loop.engine.host
        learned, path = loop.engine.learned, deployment.learned
        if learned is not None and path is not None and path.exists():
            learned.restore(load_state(path), str(path))
        self._kept = self.state()  # what the file has

    @property
    def failure(self) -> EngineFailed | None:
        return None if self.loop.works else self.loop.failure

    @property
    def running(self) -> int:
        return self.loop.running

    @property
    def waiting(self) -> int:
        return self.loop.waiting

    @property
    def accepting(self) -> bool:
        return self.works and not self.loop.full

    @property
    def cancelled(self) -> int:
        return self.loop.cancelled

    def state(self) -> dict[str, Any] | None:
        """The drafter's state that lasts over requests; None where there is none, or the engine has
        failed."""
        learned = self.loop.engine.learned
        return None if learned is None or self.loop.failure else learned.state()

    async def keep_learned(self) -> None:
        """Save what the drafter has learned since it was saved last. No step waits for the disk."""
        await asyncio.to_thread(self.save, await self.loop.between_steps(self.state))

    def save(self, state: dict[str, Any] | None) -> None:
        """Save a :meth:`state`, unless the file has it."""
        path = self.deployment.learned
        if state is None or path is None or state == self._kept:
            return
        try:
            save_state(state, path)
        except OSError as error:
            logger.warning("what was learned is not saved: %s", error)
        else:
            self._kept = state

    async def beside(self, deployment: Deployment) -> ServedEngine:
        engine = self.loop.engine
        if engine.host.exclusive and self.loop.works:
            raise UserError(
                "an engine on placed devices is not replaced while it serves: serve the other"
                " configuration on another port, and stop this server when its clients have moved"
            )
        await engine.host.wait()

        def start() -> ServedEngine:
            # With this engine's device and the data type of its target.
            own, same = engine.pair.spec, deployment.pair == self.deployment.pair
            spec = own if same else run_as(own, deployment.pair)
            other = engine.another(spec, deployment.configuration)
            try:
                if other.max_length < engine.max_length:
                    raise UserError(
                        f"its models hold {other.max_length} tokens, but clients were promised"
                        f" {engine.max_length}"
                    )
                return ServedEngine(EngineLoop(other, self.loop.queue), deployment)
            except BaseException:
                other.close()
                raise

        starting = asyncio.get_running_loop().run_in_executor(None, start)
        try:
            served = await asyncio.shield(starting)
        except asyncio.CancelledError:  # the thread continues, and what it starts would remain
            starting.add_done_callback(_end_unclaimed)
            raise
        served.loop.open()
        served.loop.observer = self.loop.observer
        return served

    async def finish(self) -> None:
        with suppress(RuntimeError):  # its process has ended
            await self.keep_learned()
        await super().finish()

    async def close(self) -> None:
        self.loop.close()

    def end(self, at_once: bool = False) -> None:
        self.loop.engine.close()


def _end_unclaimed(starting: asyncio.Future[ServedEngine]) -> None:
    """End what was started for a task that was cancelled. That takes a while, also when the event
    loop is about to end."""
    if not starting.cancelled() and starting.exception() is None:
        Thread(target=starting.result().end).start()
