"""A sample of the prompts that are answered, kept in files where the user asks for it.

Nothing of it is in the way of an answer: a prompt is read again from its request's body once the
answer has begun, and written by a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.serving.protocol.chat import ChatRequest
from cluster.serving.protocol.completions import CompletionRequest
from cluster.serving.protocol.errors import ApiError
from specdec_core.prompts.prompt import Prompt
from specdec_core.prompts.shards import keep_within, write_shard

logger = logging.getLogger(__name__)

ROWS = 256  # prompts that fill a file
WRITE_SECONDS = 300.0  # after which fewer are written


@dataclass(frozen=True)
class PromptSampling:
    """Keep the prompts of a `share` of the answered requests in `folder`, up to `limit` bytes:
    then the oldest files are deleted."""

    folder: Path
    share: float = 0.05
    limit: int = 200_000_000


class Samples:
    """The prompts that were drawn, until they are written."""

    def __init__(self, sampling: PromptSampling, tokenizer: Any, seed: int | None = None) -> None:
        self.sampling, self._tokenizer = sampling, tokenizer
        self._random = Random(seed)
        self._drawn: list[Prompt] = []
        self._reading: set[asyncio.Task[None]] = set()
        self._failed = False

    def draws(self) -> bool:
        """Whether the next request is one of the sample."""
        return self._random.random() < self.sampling.share

    def add(self, path: str, body: bytes) -> None:
        """Take the prompts of an answered request; does not wait for that."""
        task = asyncio.create_task(self._add(path, body))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def _add(self, path: str, body: bytes) -> None:
        read = await asyncio.to_thread(self._read, path, body)
        self._drawn += read  # not in one statement, which takes the list before it waits
        if len(self._drawn) >= ROWS:
            await self.write()

    async def write(self) -> None:
        """Write what was drawn since the last time."""
        drawn, self._drawn = self._drawn, []
        if drawn:
            await asyncio.to_thread(self._write, drawn)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write them during the block, and what is left at its end."""

        async def periodically() -> None:
            while True:
                await asyncio.sleep(WRITE_SECONDS)
                await self.write()

        task = asyncio.create_task(periodically())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(*self._reading)
            await self.write()

    def _read(self, path: str, body: bytes) -> list[Prompt]:
        try:
            if path == "/v1/chat/completions":
                chat = ChatRequest.from_body(body)
                messages = tuple(message.message for message in chat.messages)
                asked = [Prompt(_id(), messages[-1].content, messages=messages)]
                # Others are begun answers, or need more than their messages.
                return asked if messages[-1].role == "user" and chat.plain else []
            prompts = CompletionRequest.from_body(body).prompts
        except ApiError:  # it was answered by another version's rules
            return []
        texts = [p if isinstance(p, str) else self._tokenizer.decode(p) for p in prompts]
        return [Prompt(_id(), text) for text in texts if text.strip()]

    def _write(self, prompts: list[Prompt]) -> None:
        try:
            write_shard(self.sampling.folder, prompts)
            keep_within(self.sampling.folder, self.sampling.limit)
            self._failed = False
        except OSError as error:
            if not self._failed:  # said once, as long as it goes on
                logger.warning("%s: sampled prompts are lost: %s", self.sampling.folder, error)
            self._failed = True


def _id() -> str:
    return uuid.uuid4().hex


class Sampler:
    """ASGI middleware: hands the bodies of some answered requests to `samples`."""

    PATHS = ("/v1/completions", "/v1/chat/completions")

    def __init__(self, app: ASGIApp, samples: Samples) -> None:
        self.app, self.samples = app, samples

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = scope["type"] == "http" and scope["path"] in self.PATHS
        if not wanted or not self.samples.draws():
            await self.app(scope, receive, send)
            return
        body = bytearray()

        async def listen() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self.samples.add(scope["path"], bytes(body))
            await send(message)

        await self.app(scope, listen, answer)
