"""Load on a server of OpenAI's completions: it sends requests and times their streamed answers.

In a closed loop each of `clients` clients sends its next request when its last is answered. In an
open loop each request is sent at its arrival time, answered or not. All times
are seconds of one clock, this process's, after the run's start.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from time import perf_counter
from typing import Any

import httpx

from specdec_core.search.load.records import LoadRecord, LoadRequest
from specdec_core.servers.completions import SILENCE, refusal


def run_load(
    url: str, workload: Iterable[LoadRequest], clients: int | None = None
) -> list[LoadRecord]:
    """Send a workload to the server at `url` and return a record of each request, in its order.

    Args:
        url: the server's, without `/v1`.
        workload: what to send. In an open loop in the order of arrival.
        clients: of a closed loop; unset, the loop is open.

    Requests that fail are recorded, never raised.
    """
    return asyncio.run(_run(url, workload, clients))


async def _run(url: str, workload: Iterable[LoadRequest], clients: int | None) -> list[LoadRecord]:
    unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    # No proxy of the environment's: the server is here.
    async with httpx.AsyncClient(
        base_url=url, limits=unlimited, timeout=SILENCE, trust_env=False
    ) as http:
        load = _Load(http)
        if clients is None:
            await load.open_loop(workload)
        else:
            await load.closed_loop(workload, clients)
    return sorted(load.records, key=lambda record: record.index)


class _Load:
    """One run: its clock starts when it is made."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.records: list[LoadRecord] = []
        self.start = perf_counter()

    def now(self) -> float:
        return perf_counter() - self.start

    async def closed_loop(self, workload: Iterable[LoadRequest], clients: int) -> None:
        waiting = iter(enumerate(workload))  # shared by the clients
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self.client(waiting))

    async def client(self, waiting: Iterator[tuple[int, LoadRequest]]) -> None:
        for index, request in waiting:
            await self.send(index, request)

    async def open_loop(self, workload: Iterable[LoadRequest]) -> None:
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(workload):
                if request.arrival is None:
                    raise ValueError(f"request {index} of an open loop has no arrival time")
                await asyncio.sleep(max(request.arrival - self.now(), 0))
                group.create_task(self.send(index, request))

    async def send(self, index: int, request: LoadRequest) -> None:
        content = json.dumps(body_of(request)).encode()
        record = LoadRecord(index=index, sent=self.now(), arrival=request.arrival)
        try:
            await self.stream(content, record)
        except (httpx.HTTPError, ValueError) as error:
            record.error = _reason(error)
        if record.error is None:
            record.error = shortcoming(record, request)
        self.records.append(record)

    async def stream(self, content: bytes, record: LoadRecord) -> None:
        """Send a request and fill its record from the answer's events."""
        headers = {"Content-Type": "application/json"}
        async with self.http.stream(
            "POST", "/v1/completions", content=content, headers=headers
        ) as answer:
            record.status = answer.status_code
            if answer.status_code != httpx.codes.OK:
                text = (await answer.aread()).decode(errors="replace")
                record.error = f"status {answer.status_code}: {refusal(text)}"
                return
            record.error = "the answer broke off"  # until its end has come
            async for line in _lines(answer):
                if not line.startswith("data:"):
                    continue
                event = line.removeprefix("data:").strip()
                if event == "[DONE]":
                    record.error = None
                    return
                self.read(json.loads(event), record)

    def read(self, event: dict[str, Any], record: LoadRecord) -> None:
        """An event of the stream: a part of the text, its end, how it came about, or the numbers of
        tokens."""
        if "error" in event:
            raise ValueError(refusal(json.dumps(event)))
        for choice in event.get("choices") or ():
            text = choice.get("text") or ""
            if text or choice.get("finish_reason"):
                record.last = self.now()
            if text and record.first is None:
                record.first = record.last
            record.text += text
        if usage := event.get("usage"):
            record.prompt_tokens = usage["prompt_tokens"]
            record.tokens = usage["completion_tokens"]
        if ours := event.get("specdec"):
            record.rounds, record.drafted = ours["rounds"], ours["drafted"]


async def _lines(answer: httpx.Response) -> AsyncIterator[str]:
    """The lines of a stream. httpx would end one at U+2028, too, which a text may have."""
    rest = ""
    async for part in answer.aiter_text():
        *lines, rest = (rest + part).split("\n")
        for line in lines:
            yield line
    yield rest


def body_of(request: LoadRequest) -> dict[str, Any]:
    """What all servers take: greedy, and past the end of a text, so that all write
    the same number of tokens; the server counts them."""
    return {
        "prompt": request.prompt,
        "max_tokens": request.max_new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def shortcoming(record: LoadRecord, request: LoadRequest) -> str | None:
    """Why a complete answer cannot be compared with other answers; None where it can."""
    if record.tokens != request.max_new_tokens:
        return f"wrote {record.tokens} of {request.max_new_tokens} tokens"
    return None if record.first is not None else "wrote no text"


def _reason(error: Exception) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
