"""Listening for HTTP in the process that answers.

Ray Serve's proxy is a process of its own, through which every byte of an answer goes. Where clients
can reach the replica itself, as on a cluster of one node, nothing needs to be between them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.serving.http.connections import BoundedProtocol
from cluster.serving.tls import Tls

DRAIN = 4.0  # seconds that answers under way may still take when the server stops
CONNECTIONS = 512  # at a time
_KEEP = 90  # seconds that an idle connection stays open
_LOOK = 0.01


class UntilDisconnected:
    """ASGI middleware: what is being done for a client ends when the client leaves, as behind Ray
    Serve's proxy. uvicorn only tells of it, and an answer that is sent at once does not ask."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        complete = False
        leaving: asyncio.Task[Message] | None = None  # waits once the body has been read

        def left(_: asyncio.Task[Message]) -> None:
            if not complete:
                answering.cancel()

        async def received() -> Message:
            nonlocal leaving
            if leaving is not None:
                return await asyncio.shield(leaving)
            message = await receive()
            if not message.get("more_body", False):
                leaving = asyncio.ensure_future(receive())
                leaving.add_done_callback(left)
            return message

        async def sent(message: Message) -> None:
            nonlocal complete
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                complete = True

        answering = asyncio.ensure_future(self.app(scope, received, sent))
        try:
            await answering
        except asyncio.CancelledError:
            if leaving is None or not leaving.done():
                raise  # by the server, which stops
        finally:
            complete = True
            if leaving is not None:
                leaving.cancel()


@dataclass(frozen=True)
class Listener:
    """An address to listen on, encrypted with `tls`, if given. `drain`: seconds that answers under
    way may still take when the application ends. While there are `connections` or more, requests
    are refused (503)."""

    host: str
    port: int
    tls: Tls | None = None
    drain: float = DRAIN
    connections: int = CONNECTIONS

    @asynccontextmanager
    async def serving(self, app: ASGIApp) -> AsyncIterator[None]:
        """Answer by `app` during the block, whose lifespan is somebody else's; then break off what
        is under way. Raises :class:`OSError` where the address cannot be used."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        bound = socket.create_server((self.host, self.port), family=family)
        config = uvicorn.Config(
            UntilDisconnected(app),
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
                await answering  # why it ended
            yield
        finally:
            server.should_exit = True
            await answering
            bound.close()
