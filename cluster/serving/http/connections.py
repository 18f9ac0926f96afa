"""Bounds of a connection before anything is known of its client."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD = 64 * 1024  # bytes of a request's first line and headers
SECONDS = 10.0  # until a request is complete, with its body
_REFUSED = 100  # connections beyond the limit that are answered 503; further ones are closed


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds for a request's head and time, and for connections: uvicorn's
    `limit_concurrency` refuses requests, but keeps their connections."""

    _timer: asyncio.TimerHandle | None = None  # while a request is incomplete
    _head = 0  # bytes of an incomplete head
    _complete = False  # whether the head is
    _refusal = HTTPStatus.BAD_REQUEST

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()
        limit = self.limit_concurrency
        if limit is not None and len(self.connections) > limit + _REFUSED:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._head = 0 if self._complete else self._head + len(data)
        if self._head > HEAD and not self.transport.is_closing():
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._complete = False
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._complete = True
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD:
            self._refusal = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            raise ValueError("the head is too large")  # uvicorn then calls send_400_response
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(SECONDS, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        if self.cycle and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)

    def _refuse(self, status: HTTPStatus) -> None:
        self.transport.write(
            f"HTTP/1.1 {status.value} {status.phrase}\r\nconnection: close\r\n"
            f"content-length: 0\r\n\r\n".encode()
        )
        self.transport.close()
