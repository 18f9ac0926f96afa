"""The HTTP application in front of another program's server: keys and limits, metrics, deployment.
All else passes through."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from time import monotonic, perf_counter
from typing import Any, cast
from urllib.parse import quote

import aiohttp
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request as HttpRequest
from yarl import URL

from cluster.serving.engine_loop import EngineFailed
from cluster.serving.external.metrics import ExternalMetrics
from cluster.serving.external.process import LOOK, ExternalServer
from cluster.serving.fleet import Fleet
from cluster.serving.http.access import ACCOUNT, Access
from cluster.serving.http.answer import event, while_connected
from cluster.serving.http.app import fleet_app
from cluster.serving.http.bodies import read_body
from cluster.serving.http.limits import Account, Deadline, WindowUse, within
from cluster.serving.http.listener import Listener
from cluster.serving.http.routes import deploy
from cluster.serving.http.service import FleetService
from cluster.serving.protocol.errors import ApiError, rate_limited, unavailable
from cluster.serving.protocol.models import Health
from specdec_core.models.loading import load_tokenizer
from specdec_core.models.pair import max_length_of
from specdec_core.prompts.chat import template_of

# Headers of one connection, and those that this server's access needs.
_OWN = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding"}
_OWN |= {b"upgrade", b"host", b"content-length", b"authorization", b"proxy-authorization"}
_OWN |= {b"date", b"server", deploy.TOKEN_HEADER.encode()}
_MORE = ("tokenize", "detokenize", "version", "rerank", "score", "pooling", "classify")
_PATHS = ("v1/", *_MORE)
_OURS = "v1/specdec/"  # which another program does not have
# Paths that generate nothing, where a request need not say how many tokens it asks for.
_NO_ANSWER = (*_MORE, "v1/embeddings", "v1/rerank", "v1/score", "v1/load_lora", "v1/unload_lora")
_NEW_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
_CHOICES = ("n", "best_of", "n_cmpl")
_USAGE_END = 4096  # bytes at the end of an answer that have its usage
_FAILED = b'data: {"error"'  # an event that may say that an engine has ended
_TOTAL = re.compile(rb'"total_tokens" *: *(\d+)')
_RESTART = 10  # seconds in which a server may have started again
_ENDED = unavailable(
    "the server's process has ended before the answer was complete, and is started again",
    _RESTART,
    code="server_ended",
)


class ExternalService(FleetService[Fleet[ExternalServer]]):
    """Passes requests to the servers of a fleet. `queue` requests may wait beyond those that are
    decoded."""

    def __init__(
        self, fleet: Fleet[ExternalServer], model: str, access: Access, queue: int
    ) -> None:
        super().__init__(fleet, model, access)
        self.queue = queue
        self.slots = sum(replica.served.program.slots for replica in fleet.replicas)
        pair = fleet.deployment.pair  # deployments keep the target and the length
        self.max_length = max_length_of(pair)
        self.chat = template_of(load_tokenizer(pair.target)) is not None
        self.metrics = ExternalMetrics(fleet)
        self.drift = self.metrics.drift

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with super().running():
            self.fleet.repeat(LOOK, self.metrics.look)
            yield

    def choose(self) -> ExternalServer:
        """The least busy server that answers. Raises :class:`ApiError`."""
        if self.fleet.running >= self.slots + self.queue:
            raise rate_limited("too many requests are waiting already", seconds=1)
        if not (working := self.fleet.working):
            raise unavailable("no server answers; one is being started again", _RESTART)
        return min(working, key=lambda server: server.running)

    async def health(self) -> Health:
        """What only this library's engine counts is 0."""
        fleet = self.fleet
        return self._health(
            ready=bool(fleet.working),
            slots=self.slots,
            queue=self.queue,
            max_length=self.max_length,
            preemptions=0,
            prefix_hits=0,
            prefix_tokens=0,
            chat=self.chat,
            engine=fleet.replicas[0].served.program.engine,
        )


def build_external_app(service: ExternalService, listener: Listener | None = None) -> FastAPI:
    """The routes of `service`. See :func:`fleet_app`."""
    app = fleet_app(service, listener)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await service.metrics.page(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.api_route("/{path:path}", methods=["GET", "POST"], include_in_schema=False)
    async def passed(path: str, request: HttpRequest) -> Response:
        known = path.startswith(_PATHS) and not path.startswith(_OURS)
        if ".." in path.split("/") or not known:
            raise ApiError(f"{request.method} /{path}: Not Found", status=404)
        body = await read_body(request)
        taken = _limit(service, request, path, body) if request.method == "POST" else None
        return await while_connected(request, _passed(service, request, body, taken))

    return app


def _limit(
    service: ExternalService, request: HttpRequest, path: str, body: bytes
) -> WindowUse | None:
    """Apply the limits of tokens; returns what was taken of the key's. The tokenizer is the
    server's: a prompt counts as a token for every four bytes of the body. A request that says
    nothing of new tokens asks for as many as the context holds. Raises :class:`ApiError`."""
    account: Account = getattr(request.state, ACCOUNT)
    most = service.access.limits.tokens
    if most is None and account.allowance.tokens is None:
        return None
    try:
        asked: dict[str, Any] = json.loads(body)
        # Servers prefer one name or the other: the largest number counts.
        given = [int(asked[name]) for name in _NEW_TOKENS if asked.get(name) is not None]
        choices = [int(asked[name]) for name in _CHOICES if asked.get(name)]
        prompts = _prompts(asked.get("prompt"))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ApiError("the body is no JSON object with numbers of tokens") from None
    if min([0, *choices, *given]) < 0:
        raise ApiError("max_tokens: a negative number may be unlimited", param="max_tokens")
    if given:
        new = max(given)
    else:
        generates = not path.startswith(_NO_ANSWER)
        new = service.max_length if generates else 0
    if most is not None and new > most:
        asks = "" if given else "without it a request asks for all that the context holds: "
        raise ApiError(
            f"max_tokens: {asks}{new} new tokens are more than the {most} of a request here",
            param="max_tokens",
        )
    return account.tokens(len(body) // 4 + new * max([1, *choices]) * prompts)


def _prompts(prompt: object) -> int:
    """The number of prompts of a completion. A list of numbers is one, as tokens."""
    if not isinstance(prompt, list) or all(isinstance(each, int) for each in prompt):
        return 1
    return len(prompt)


async def _passed(
    service: ExternalService, request: HttpRequest, body: bytes, taken: WindowUse | None
) -> Response:
    """The server's answer: events as they come, all else whole. What it did not use of the tokens
    `taken` is given back at its end. Raises :class:`ApiError` where its process ends before, or the
    answer takes too long."""
    parts = within(_exchanged(service, request, body), Deadline.of(service.access.limits.seconds))
    try:
        answer = cast(aiohttp.ClientResponse, await anext(parts))
    except BaseException:  # also a client that leaves
        if taken is not None:
            taken.close()
        raise
    kept = _kept(answer.raw_headers)
    chunks = cast(AsyncIterator[bytes], parts)
    if taken is not None:
        chunks = _counted(chunks, taken, len(body) // 4 if answer.ok else None)
    first = await anext(chunks, b"")
    response: Response
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        response = StreamingResponse(_events(first, chunks), answer.status)
    else:
        content = first + b"".join([chunk async for chunk in chunks])
        response = Response(content, answer.status)
    response.raw_headers += kept
    return response


def _kept(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that pass: all but the ones of one connection, which `Connection` names, too."""
    lower = [(name.lower(), value) for name, value in headers]
    named = b",".join(value.lower() for name, value in lower if name == b"connection")
    dropped = _OWN | {name.strip() for name in named.split(b",")}
    return [(name, value) for name, value in lower if name not in dropped]


async def _counted(
    chunks: AsyncIterator[bytes], taken: WindowUse, prompt: int | None
) -> AsyncIterator[bytes]:
    """The same, which give back at their end what was not used: all of it without a `prompt`, which
    the server has refused. An answer that does not report its usage counts as its prompt does."""
    length, end = 0, b""
    try:
        async for chunk in chunks:
            length, end = length + len(chunk), (end + chunk)[-_USAGE_END:]
            yield chunk
    finally:
        if prompt is not None:
            used = max(map(int, _TOTAL.findall(end)), default=0)
            taken.used = used or prompt + length // 4
        taken.close()


async def _exchanged(
    service: ExternalService, request: HttpRequest, body: bytes
) -> AsyncIterator[aiohttp.ClientResponse | bytes]:
    """An answer's head, and then its bytes. A server that takes no connection has not begun, so
    another server gets the request. Raises :class:`ApiError` where no server answers, or its
    process ends before the answer does."""
    others = len(service.fleet.replicas) - 1
    while True:
        try:
            async with aclosing(_asked(service, request, body)) as parts:
                async for part in parts:
                    yield part
            return
        except aiohttp.ClientConnectorError:
            if not others:
                raise _ENDED from None
            others -= 1


async def _asked(
    service: ExternalService, request: HttpRequest, body: bytes
) -> AsyncGenerator[aiohttp.ClientResponse | bytes]:
    """The same of one server. Raises :class:`aiohttp.ClientConnectorError` where it takes no
    connection."""
    began, reason = perf_counter(), "abort"
    server = service.choose()
    headers = [
        (name.decode("latin-1"), value.decode(errors="replace"))  # it sends UTF-8
        for name, value in _kept(request.headers.raw)
    ]
    headers.append(("authorization", f"Bearer {server.key}"))
    query = f"?{request.url.query}" if request.url.query else ""
    url = URL(f"{server.url}{quote(request.scope['path'])}{query}", encoded=True)
    if server.running == server.delivering:
        server.worked = monotonic()
    server.running += 1
    try:
        asked = server.http.request(
            request.method, url, headers=headers, data=body, allow_redirects=False
        )
        async with asked as answer:
            if answer.status >= 500:
                await server.check_engine()
            yield answer
            first = True
            async for chunk in answer.content.iter_any():
                if _FAILED in chunk:
                    await server.check_engine()
                server.worked = monotonic()
                if first:
                    service.metrics.first.observe(perf_counter() - began)
                    first = False
                server.delivering += 1
                try:
                    yield chunk
                finally:
                    server.delivering -= 1
                    server.worked = monotonic()
        reason = "stop" if answer.ok else "refused"
    except aiohttp.InvalidURL:
        reason = "refused"
        raise ApiError("the address has characters that no address has") from None
    except aiohttp.ClientConnectorError:
        reason = "error"
        raise
    except (aiohttp.ClientError, EngineFailed):
        reason = "error"
        raise _ENDED from None
    finally:
        server.running -= 1
        service.metrics.ended.labels(reason).inc()


async def _events(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same after the first; an error is the last event."""
    try:
        yield first
        async for chunk in chunks:
            yield chunk
    except ApiError as error:
        yield b"\n\n" + event(error.body).encode()
