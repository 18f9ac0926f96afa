"""Asking an application in this process, and reading an answer's server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI

T = TypeVar("T")


@asynccontextmanager
async def client_of(app: FastAPI, url: str = "http://test") -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, which runs during the block."""
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url=url, timeout=60) as http,
    ):
        yield http


def asked(app: FastAPI, story: Callable[[httpx.AsyncClient], Coroutine[Any, Any, T]]) -> T:
    """What `story` returns with a client of the application."""

    async def main() -> T:
        async with client_of(app) as http:
            return await story(http)

    return asyncio.run(asyncio.wait_for(main(), 120))


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a complete stream without an error."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]", answer.text
    return [json.loads(line) for line in lines]
