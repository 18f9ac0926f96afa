"""Real HTTP servers in this process, for tests of what talks to them."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from cluster.serving.engine_loop import QUEUE, EngineLoop
from cluster.serving.engine_process import EngineProcess
from cluster.serving.fleet import Fleet
from cluster.serving.http.access import EVERYBODY, Access
from cluster.serving.http.app import build_app
from cluster.serving.http.pages import Page
from cluster.serving.http.service import Service
from cluster.serving.served import NOT_OPERATED, Deployment, Operation, Served
from dashboards.pages import PLAYGROUND
from specdec_core.config import Configuration
from specdec_core.engine import Engine
from specdec_core.models.pair import Pair
from specdec_core.servers.process import ServerProcess
from tests.external_program import ENDS


def served_of(
    engine: Engine | EngineProcess,
    queue: int = QUEUE,
    deployment: Deployment | None = None,
    learned: Path | None = None,
) -> Served:
    """An engine behind its loop, as it is deployed."""
    deployment = deployment or Deployment(
        pair=engine.pair.spec, configuration=engine.configuration, learned=learned
    )
    return Served(EngineLoop(engine, queue), deployment)


def fleet_of(
    engine: Engine | EngineProcess, operation: Operation = NOT_OPERATED, **more: Any
) -> Fleet:
    """A fleet of one engine; `more` as above."""
    return Fleet([served_of(engine, **more)], operation)


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
