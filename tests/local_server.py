"""Real HTTP servers in this process, for tests of what talks to them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from cluster.serving.http.app import build_app
from cluster.serving.http.service import CompletionService
from specdec_core.config import Configuration
from specdec_core.engine import Engine
from specdec_core.models.pair import Pair


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

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()


def engine_server(
    pair: Pair, configuration: Configuration, slots: int, queue: int = 128
) -> LocalServer:
    """The pair's engine behind our HTTP application."""
    return LocalServer(
        lambda: build_app(
            CompletionService(Engine(pair, configuration, slots), "tiny", queue=queue)
        )
    )
