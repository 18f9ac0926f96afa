"""The bodies of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from cluster.serving.protocol.errors import ApiError
from cluster.serving.protocol.fields import MAX_BODY_BYTES

SMALL = 4096  # bytes of a body that is read and encoded in a millisecond or two

T = TypeVar("T")


async def read_body(request: HttpRequest) -> bytes:
    """The body, up to a limit. Raises :class:`ApiError` (413)."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
    return bytes(body)


async def soon(small: bool, call: Callable[..., T], *arguments: object) -> T:
    """The result of a call: at once where little is to do, else in a thread, so that the event loop
    goes on. Handing little to a thread takes longer than doing it, and now and then milliseconds,
    while the thread waits for the interpreter."""
    return call(*arguments) if small else await asyncio.to_thread(call, *arguments)
