"""A server that stops lets answers under way end, up to a limit."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from cluster.serving.control import url_of
from cluster.serving.http.listener import Listener
from cluster.serving.server_process import free_port

PARTS = 4


def app(part: float) -> FastAPI:
    """Answers in `PARTS` parts, of which each takes so many seconds."""
    app = FastAPI()

    async def parts() -> AsyncIterator[str]:
        for number in range(PARTS):
            yield f"{number} "
            await asyncio.sleep(part)

    @app.get("/")
    async def answer() -> StreamingResponse:
        return StreamingResponse(parts())

    return app


async def stopped(part: float, drain: float, host: str = "127.0.0.1") -> list[str]:
    """The parts of an answer that a client reads when the server stops after the first one."""
    listener, read = Listener(host, free_port(), drain=drain), []
    first = asyncio.Event()

    async def client() -> None:
        url = url_of(listener.host, listener.port)
        async with httpx.AsyncClient(trust_env=False) as http, http.stream("GET", url) as answer:
            async for text in answer.aiter_text():
                read.extend(text.split())
                first.set()

    async with listener.serving(app(part)):
        reading = asyncio.create_task(client())
        await first.wait()
    await asyncio.wait_for(reading, 5)
    return read


def bound(host: str) -> bool:
    """Whether this machine has the address."""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_answers_under_way_end_whole(host: str) -> None:
    if host == "::1" and not bound(host):
        pytest.skip("this machine has no IPv6")
    read = asyncio.run(asyncio.wait_for(stopped(0.05, 5, host), 20))
    assert read == [str(number) for number in range(PARTS)]


def test_an_answer_that_takes_too_long_is_broken_off() -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        asyncio.run(asyncio.wait_for(stopped(60, drain=1), 20))
