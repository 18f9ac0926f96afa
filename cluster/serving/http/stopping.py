"""A server that stops: it refuses new requests and finishes the running ones."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.serving.http.access import OPERATE
from cluster.serving.http.errors import answer
from cluster.serving.protocol.errors import unavailable

_LOOK = 0.01  # seconds between looks at whether requests have ended
_STOPS = unavailable("the server stops and takes no more requests", 5, code="server_stops")


class Stopping:
    """Whether a server stops, and its running requests."""

    def __init__(self) -> None:
        self.until: float | None = None  # by the event loop's clock; None: it does not stop
        self.running = set[asyncio.Timeout]()

    async def within(self, seconds: float) -> None:
        """Refuse new requests. Returns once the running ones have ended, or were cancelled
        `seconds` after the first call."""
        if self.until is None:
            self.until = asyncio.get_running_loop().time() + seconds
            for limit in self.running:
                limit.reschedule(self.until)
        while self.running:
            await asyncio.sleep(_LOOK)


class Admission:
    """ASGI middleware: knows the running requests. When the server stops, it refuses POST requests
    (503), and at the end also running requests without a begun answer. GET requests, and requests
    that operate the server, are answered until then."""

    def __init__(self, app: ASGIApp, stopping: Stopping) -> None:
        self.app, self.stopping = app, stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPERATE:
            await self.app(scope, receive, send)
            return
        if self.stopping.until is not None and scope["method"] == "POST":
            await answer(_STOPS)(scope, receive, send)
            return
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            async with asyncio.timeout_at(self.stopping.until) as limit:
                self.stopping.running.add(limit)
                try:
                    await self.app(scope, receive, sending)
                finally:
                    self.stopping.running.discard(limit)
        except TimeoutError:
            if begun or not limit.expired():
                raise
            await answer(_STOPS)(scope, receive, send)
