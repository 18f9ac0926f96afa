"""The bodies of requests."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest

from cluster.serving.protocol.errors import ApiError
from cluster.serving.protocol.fields import MAX_BODY_BYTES


async def read_body(request: HttpRequest) -> bytes:
    """The body, up to a limit. Raises :class:`ApiError` (413)."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
    return bytes(body)
