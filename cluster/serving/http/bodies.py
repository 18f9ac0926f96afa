"""The bodies of requests: FastAPI describes them, this module reads and validates them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.serving.protocol.errors import ApiError, parse_body

MAX_BODY_BYTES = 8 * 2**20
_SMALL = 4096  # bytes of a body that is validated and tokenised in a millisecond or two
# Few, because tokenising takes a hundred times the memory of the text.
_THREADS = ThreadPoolExecutor(2, "bodies")

T = TypeVar("T")


async def read_body(request: HttpRequest) -> bytes:
    """The body, up to a limit. Raises :class:`ApiError` (413; 415 for a compressed one)."""
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise ApiError(
            f"Content-Encoding: {coding[:40]}: the body is compressed, which this server does not"
            " take; send it as it is",
            status=415,
        )
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
    return bytes(body)


async def run(call: Callable[..., T], *arguments: object, quick: bool) -> T:
    """The result of a call. A call that is not `quick` runs in a thread, so that the event loop
    continues. For a quick one that would take longer than the call, sometimes by milliseconds,
    because the thread waits for the interpreter."""
    if quick:
        return call(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call, *arguments)


class JsonRequest(HttpRequest):
    """A request with a validated body: a model instead of bytes."""

    value: Any
    small: bool  # whether the body was

    async def body(self) -> Any:
        return self.value

    json = body


class JsonRoute(APIRoute):
    """A route that validates its body as strict JSON, whatever its content type says, and not on
    the event loop where the body is large. Errors are OpenAI's."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        handle, field = super().get_route_handler(), self.body_field
        if field is None:
            return handle
        kind = field.field_info.annotation

        async def handle_json(request: HttpRequest) -> Response:
            content = await read_body(request)
            parsed = JsonRequest(request.scope, request.receive)
            parsed.small = len(content) <= _SMALL
            parsed.value = await run(parse_body, kind, content, quick=parsed.small)
            return await handle(parsed)

        return handle_json
