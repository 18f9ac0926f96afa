"""Listening for HTTP in the process that answers.

Ray Serve's proxy is a separate process that every byte of an answer passes through. It is not
needed where clients can reach the replica itself, as on a cluster of one node.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from cluster.serving.http.connections import BoundedProtocol
from cluster.serving.tls import Tls

DRAIN = 4.0  # seconds that running requests may take when the server stops
CONNECTIONS = 512  # at a time
_KEEP = 90  # seconds that an idle connection stays open
_LOOK = 0.01


@dataclass(frozen=True)
class Listener:
    """An address to listen on, encrypted with `tls`, if given. `drain`: seconds that running
    requests may take when the application ends. From `connections` on, requests are refused
    (503)."""

    host: str
    port: int
    tls: Tls | None = None
    drain: float = DRAIN
    connections: int = CONNECTIONS

    @asynccontextmanager
    async def serving(self, app: ASGIApp) -> AsyncIterator[None]:
        """Answer by `app` during the block, without its lifespan; then cancel the running requests.
        Raises :class:`OSError` where the address cannot be used."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        bound = socket.create_server((self.host, self.port), family=family)
        config = uvicorn.Config(
            app,
            lifespan="off",
            http=BoundedProtocol,
            ws="none",
            access_log=False,
            log_config=None,
            log_level="critical",
            server_header=False,
            limit_concurrency=self.connections,
            timeout_keep_alive=_KEEP,
            timeout_graceful_shutdown=0,
            ssl_certfile=self.tls.certificate if self.tls else None,
            ssl_keyfile=self.tls.key if self.tls else None,
        )
        server = uvicorn.Server(config)
        answering = asyncio.create_task(server.serve([bound]))
        try:
            while not server.started and not answering.done():
                await asyncio.sleep(_LOOK)
            if answering.done():
                await answering  # raises the reason
            yield
        finally:
            server.should_exit = True
            await answering
            bound.close()
