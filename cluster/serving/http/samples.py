"""A sample of the answered prompts, kept in files where the user asks for it.

It does not delay an answer: a prompt is parsed again from its request's body once the answer has
begun, and written by a separate thread.
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

from cluster.serving.http.routes.chat import ChatRequest
from cluster.serving.http.routes.completions import CompletionRequest
from cluster.serving.protocol.errors import ApiError, parse_body
from specdec_core.prompts.prompt import Prompt
from specdec_core.prompts.shards import keep_within, write_shard

logger = logging.getLogger(__name__)

ROWS = 256  # prompts that fill a file
WRITE_SECONDS = 300.0  # after which fewer are written
_COMPLETIONS, _CHATS = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class PromptSampling:
    """Keep the prompts of a `share` of the answered requests in `folder`, up to `limit` bytes:
    beyond that the oldest files are deleted."""

    folder: Path
    share: float = 0.05
    limit: int = 200_000_000


class Samples:
    """The sampled prompts, until they are written."""

    def __init__(self, sampling: PromptSampling, tokenizer: Any, seed: int | None = None) -> None:
        self.sampling, self._tokenizer = sampling, tokenizer
        self._random = Random(seed)
        self._sampled: list[Prompt] = []
        self._parsing: set[asyncio.Task[None]] = set()
        self._failed = False

    def draws(self) -> bool:
        """Whether the next request is in the sample."""
        return self._random.random() < self.sampling.share

    def add(self, path: str, body: bytes) -> None:
        """Add the prompts of an answered request, in the background."""
        task = asyncio.create_task(self._add(path, body))
        self._parsing.add(task)
        task.add_done_callback(self._parsing.discard)

    async def _add(self, path: str, body: bytes) -> None:
        prompts = await asyncio.to_thread(self._prompts, path, body)
        self._sampled += prompts  # `+= await` would read the list before it waits
        if len(self._sampled) >= ROWS:
            await self.write()

    async def write(self) -> None:
        """Write the prompts sampled since the last call."""
        sampled, self._sampled = self._sampled, []
        if sampled:
            await asyncio.to_thread(self._write, sampled)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write periodically during the block, and the rest at its end."""

        async def periodically() -> None:
            while True:
                await asyncio.sleep(WRITE_SECONDS)
                await self.write()

        task = asyncio.create_task(periodically())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(*self._parsing)
            await self.write()

    def _prompts(self, path: str, body: bytes) -> list[Prompt]:
        try:
            if path == _CHATS:
                chat = parse_body(ChatRequest, body)
                messages = tuple(message.message for message in chat.messages)
                # Other chats are begun answers, or have more than their messages.
                if messages[-1].role != "user" or not chat.has_only_text:
                    return []
                return [Prompt(uuid.uuid4().hex, messages[-1].content, messages=messages)]
            prompts = parse_body(CompletionRequest, body).prompts
        except ApiError:  # it was answered by another version's rules
            return []
        texts = [p if isinstance(p, str) else self._tokenizer.decode(p) for p in prompts]
        return [Prompt(uuid.uuid4().hex, text) for text in texts if text.strip()]

    def _write(self, prompts: list[Prompt]) -> None:
        try:
            write_shard(self.sampling.folder, prompts)
            keep_within(self.sampling.folder, self.sampling.limit)
            self._failed = False
        except OSError as error:
            if not self._failed:  # one warning until it works again
                logger.warning("%s: sampled prompts are lost: %s", self.sampling.folder, error)
            self._failed = True


class Sampler:
    """ASGI middleware: hands the bodies of some answered requests to `samples`."""

    def __init__(self, app: ASGIApp, samples: Samples) -> None:
        self.app, self.samples = app, samples

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = scope["type"] == "http" and scope["path"] in (_COMPLETIONS, _CHATS)
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
