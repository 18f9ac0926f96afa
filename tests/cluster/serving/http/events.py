"""Asking an application in this process, and reading an answer's server-sent events."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from cluster.serving.http.app import build_app
from cluster.serving.http.service import Service


@asynccontextmanager
async def client_of(service: Service, *of_app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the service's application, which runs during the block."""
    app = build_app(service, *of_app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test", timeout=60
        ) as http,
    ):
        yield http


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a complete stream without an error."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]", answer.text
    return [json.loads(line) for line in lines]
