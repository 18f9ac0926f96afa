"""A page on this machine that follows work in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import uvicorn
from fastapi import FastAPI

from cluster.serving.deployment import check_port
from cluster.serving.http.access import Access, Gate
from cluster.serving.http.connections import BoundedProtocol
from cluster.serving.http.listener import CONNECTIONS
from cluster.serving.http.pages import Page, add_page

HOST = "127.0.0.1"


@contextmanager
def page_server(page: Page, state: Callable[[int], dict[str, Any]], port: int) -> Iterator[str]:
    """Show `page` while the block runs; yields its address. The page asks `/state?known=n` for
    `state(n)`. Raises :class:`UserError` where the port is taken."""
    check_port(HOST, port)
    app = FastAPI(openapi_url=None)
    app.add_middleware(Gate, access=Access(local=True))
    add_page(app, page)

    @app.get("/state")
    def current(known: int = 0) -> dict[str, Any]:
        return state(max(known, 0))

    config = uvicorn.Config(
        app,
        HOST,
        port,
        log_level="error",
        http=BoundedProtocol,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, name="page", daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        thread.join(0.01)
    try:
        yield f"http://{HOST}:{port}"
    finally:
        server.should_exit = True
        thread.join()
