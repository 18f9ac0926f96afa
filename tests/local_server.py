"""Real HTTP servers, and engines, in this process: for tests of what talks to them."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from cluster.serving.engine_fleet import EngineFleet
from cluster.serving.engine_loop import QUEUE, EngineLoop
from cluster.serving.engine_main import Load, connected, decode
from cluster.serving.engine_process import EngineProcess, Host
from cluster.serving.http.access import EVERYBODY, Access
from cluster.serving.http.app import build_app
from cluster.serving.http.pages import Page
from cluster.serving.http.service import Service
from cluster.serving.served import NOT_OPERATED, Deployment, Operation, ServedEngine
from dashboards.pages import PLAYGROUND
from specdec_core.config import Configuration, PairSpec
from specdec_core.engine import Engine
from specdec_core.engine.scheduler import Limits
from specdec_core.models.pair import Pair, load_pair
from specdec_core.servers.process import ServerProcess
from tests.external_program import ENDS


class EngineThread(threading.Thread):
    """What an engine's process runs, in a thread of this one. It ends with its connection."""

    pid = 0

    def __init__(self, load: Load, *address: Any) -> None:
        super().__init__(name="engine's process", daemon=True)
        self._load, self._address = load, address
        self.start()

    def run(self) -> None:
        with suppress(Exception):  # the other end is told of it
            decode(connected(*self._address), self._load)

    def poll(self) -> int | None:
        return None if self.is_alive() else 0

    def kill(self) -> None:
        """A thread cannot be killed."""

    def wait(self, timeout: float) -> int | None:
        self.join(timeout)
        return self.poll()


class ThreadHost(Host):
    """Runs `engine` in a thread of this process, and further engines, as they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engines = [engine]

    def start(self, port: int, key: bytes) -> EngineThread:
        return EngineThread(self._load, self.address, port, key)

    def memory(self, process: Any) -> float:
        return 0.0

    @contextmanager
    def _load(
        self, spec: PairSpec, configuration: Configuration, limits: Limits
    ) -> Iterator[Engine]:
        if self._engines:
            yield self._engines.pop()
        else:
            yield Engine(load_pair(spec), configuration, limits=limits)


def threaded(engine: Engine) -> EngineProcess:
    """An engine as it is served, but in a thread: it need not be loaded, and tests may change it
    and its pair."""
    spec, limits = engine.pair.spec, engine.scheduler.limits
    process = EngineProcess(spec, engine.configuration, limits, host=ThreadHost(engine))
    process.pair = engine.pair
    return process


@contextmanager
def opened(loop: EngineLoop) -> Iterator[EngineLoop]:
    """It takes requests during the block, in which an event loop runs."""
    loop.open()
    try:
        yield loop
    finally:
        loop.close()


def served_of(
    engine: Engine | EngineProcess,
    queue: int = QUEUE,
    deployment: Deployment | None = None,
    learned: Path | None = None,
) -> ServedEngine:
    """An engine behind its loop, as it is deployed."""
    if not isinstance(engine, EngineProcess):
        engine = threaded(engine)
    deployment = deployment or Deployment(
        pair=engine.pair.spec, configuration=engine.configuration, learned=learned
    )
    return ServedEngine(EngineLoop(engine, queue), deployment)


def fleet_of(
    engine: Engine | EngineProcess, operation: Operation = NOT_OPERATED, **more: Any
) -> EngineFleet:
    """A fleet of one engine; `more` as above."""
    return EngineFleet([served_of(engine, **more)], operation)


def service_of(
    engine: Engine | EngineProcess, access: Access = EVERYBODY, **of_fleet: Any
) -> Service:
    """The service of one engine, under the name "tiny"."""
    return Service(fleet_of(engine, **of_fleet), "tiny", access)


class LocalServer:
    """An ASGI application behind a port, on a thread of its own; made anew at each start."""

    def __init__(self, application: Callable[[], ASGIApp]) -> None:
        self.application = application

    def start(self, port: int) -> str:
        config = uvicorn.Config(self.application(), port=port, log_level="error")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            self.thread.join(0.01)
        return f"http://127.0.0.1:{port}"

    def check(self) -> None:
        assert self.thread.is_alive()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()


def ending_server(name: str = "other", log: Path | None = None) -> ServerProcess:
    """Another program, which is ready and ends at its first request."""
    return ServerProcess(
        name, lambda port: [sys.executable, "-c", ENDS, str(port)], os.environ, log
    )


def server_of(service: Service) -> LocalServer:
    """The service behind our HTTP application."""
    return LocalServer(lambda: build_app(service))


def engine_server(
    pair: Pair, configuration: Configuration, slots: int, queue: int = 128
) -> LocalServer:
    """The pair's engine behind our HTTP application, with the playground."""
    return LocalServer(
        lambda: build_app(
            service_of(Engine(pair, configuration, slots), queue=queue), page=Page(*PLAYGROUND)
        )
    )
