"""A server that stops lets answers under way end, up to a limit."""

import asyncio
import socket

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from cluster.serving.control import url_of
from cluster.serving.http import connections
from cluster.serving.http.listener import Listener
from cluster.serving.http.stopping import Admission, Stopping
from specdec_core.servers.process import free_port

PARTS = 4


def app(part):
    """Answers in `PARTS` parts of `part` seconds each."""
    app = FastAPI()

    async def parts():
        for number in range(PARTS):
            yield f"{number} "
            await asyncio.sleep(part)

    @app.get("/")
    async def answer() -> StreamingResponse:
        return StreamingResponse(parts())

    @app.get("/late")
    async def late() -> None:
        await asyncio.sleep(60)

    return app


async def stopped(part, drain, host="127.0.0.1"):
    """The parts of an answer that a client reads when the server stops after the first one."""
    listener, read = Listener(host, free_port()), []
    first = asyncio.Event()

    async def client():
        url = url_of(listener.host, listener.port)
        async with httpx.AsyncClient(trust_env=False) as http, http.stream("GET", url) as answer:
            async for text in answer.aiter_text():
                read.extend(text.split())
                first.set()

    stopping = Stopping()
    async with listener.serving(Admission(app(part), stopping)):
        reading = asyncio.create_task(client())
        await first.wait()
        await stopping.within(drain)
    await asyncio.wait_for(reading, 5)
    return read


def bound(host):
    """Whether this machine has the address."""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_answers_under_way_end_whole(host):
    if host == "::1" and not bound(host):
        pytest.skip("this machine has no IPv6")
    assert await stopped(0.05, 5, host) == [str(number) for number in range(PARTS)]


async def test_requests_whose_answers_have_not_begun_are_refused_at_the_end():
    """Also one that begins while the server stops."""
    listener, stopping = Listener("127.0.0.1", free_port()), Stopping()
    url = f"{url_of(listener.host, listener.port)}/late"
    async with (
        asyncio.timeout(20),
        listener.serving(Admission(app(1), stopping)),
        httpx.AsyncClient(trust_env=False, timeout=20) as http,
    ):
        asked = asyncio.create_task(http.get(url))
        while not stopping.running:
            await asyncio.sleep(0.01)
        ending = asyncio.create_task(stopping.within(0.5))
        while stopping.until is None:
            await asyncio.sleep(0.01)
        answers = await asyncio.gather(asked, http.get(url))
        await ending
    for refused in answers:
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_stops")


async def test_an_answer_that_takes_too_long_is_broken_off():
    with pytest.raises(httpx.RemoteProtocolError):
        await stopped(60, drain=1)


async def said(port, *parts):
    """The first line of the answer to a request that comes in these parts, without its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        return (await reader.read()).partition(b"\r\n")[0]
    except ConnectionError:
        return b"closed"
    finally:
        writer.close()


HEAD = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n"
LARGE = b"HTTP/1.1 431 Request Header Fields Too Large"
SLOW = b"HTTP/1.1 408 Request Timeout"


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ([HEAD + b"x: " + b"y" * 60_000 + b"\r\nconnection: close\r\n\r\n"], b"HTTP/1.1 200 OK"),
        ([HEAD + b"x: " + b"y" * 70_000 + b"\r\n\r\n"], LARGE),
        ([HEAD + b"x: ", *[b"y" * 10_000] * 8], LARGE),
        ([HEAD, *[b"x: " + b"y" * 1_000 + b"\r\n"] * 80], LARGE),
        ([b""], SLOW),
        ([HEAD], SLOW),
        ([b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\n", b"half"], SLOW),
    ],
)
async def test_a_request_before_its_end_takes_little(parts, line, monkeypatch):
    monkeypatch.setattr(connections, "SECONDS", 0.5)
    whole = FastAPI()

    @whole.api_route("/", methods=["GET", "POST"])
    async def answer(request: Request) -> str:
        await request.body()
        return "answered"

    listener = Listener("127.0.0.1", free_port())
    async with listener.serving(whole):
        first = await said(listener.port, *parts)
    # A client that is still sending may see the connection's end before the answer.
    assert first in ((line, b"closed") if line == LARGE else (line,))


async def test_connections_have_a_bound(monkeypatch):
    monkeypatch.setattr(connections, "_REFUSED", 2)
    listener = Listener("127.0.0.1", free_port(), connections=3)
    async with listener.serving(app(0)):
        opened = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(2)]
        ask = HEAD + b"connection: close\r\n\r\n"
        assert await said(listener.port, ask) == b"HTTP/1.1 503 Service Unavailable"
        opened += [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(3)]
        assert await said(listener.port, ask) in (b"", b"closed")
        for _, writer in opened:
            writer.close()
        await asyncio.sleep(0.1)
        assert await said(listener.port, ask) == b"HTTP/1.1 200 OK"
