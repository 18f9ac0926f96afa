"""The bodies of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from cluster.serving.protocol.errors import ApiError
from cluster.serving.protocol.fields import MAX_BODY_BYTES

SMALL = 4096  # bytes of a body that is read and encoded in a millisecond or two
# Few, because a long text takes some hundred times its size while it is cut into tokens.
_READERS = ThreadPoolExecutor(2, "bodies")

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
    """The result of a call: at once where little is to do, else in one of a few threads, so that
    the event loop goes on. Handing little to a thread takes longer than doing it, and now and then
    milliseconds, while the thread waits for the interpreter."""
    if small:
        return call(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_READERS, call, *arguments)
