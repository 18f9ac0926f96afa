"""The answer to a request for text: whole, or as server-sent events. Each protocol says how its
parts look."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any, Generic, TypeVar

from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from cluster.serving.engine_loop import EngineFailed
from cluster.serving.http.limits import Account, WindowUse, within
from cluster.serving.http.rounds import Rounds
from cluster.serving.http.service import Service
from cluster.serving.protocol.counts import AnswerMetrics, SpecDec, Usage
from cluster.serving.protocol.errors import SERVER_ERROR, ApiError
from cluster.serving.protocol.events import DONE, event
from cluster.serving.protocol.fields import StreamOptions
from cluster.serving.protocol.generation import GenerationRequest
from cluster.serving.stream import Stream
from specdec_core.engine import Chunk, Request
from specdec_core.tokens.statistics import Generation, TokenLogprobs

Body = TypeVar("Body", bound=GenerationRequest)
Choice = BaseModel  # of a protocol


class HttpAnswer(ABC, Generic[Body]):
    """What is said to one body. `requests` are the engine's, one for each choice."""

    prefix: str  # of ids
    end = DONE  # of a stream
    stream: Stream  # from when the engine has the requests

    def __init__(self, service: Service, body: Body, requests: Sequence[Request]) -> None:
        self.service, self.body, self.requests = service, body, requests
        self.configuration, self.prompts = service.engine.configuration, service.prompts
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    @abstractmethod
    def choice(self, index: int, generation: Generation) -> Choice:
        """A whole choice."""

    @abstractmethod
    def whole(self, choices: list[Any], **fields: Any) -> BaseModel:
        """The answer with these choices."""

    @abstractmethod
    def parts(self, chunks: AsyncIterator[tuple[int, Chunk]]) -> AsyncIterator[BaseModel]:
        """The events of a stream. Where it is read, the engine has the requests."""

    async def respond(self, account: Account) -> BaseModel | StreamingResponse:
        """Hand the requests to the engine, and answer. Raises :class:`ApiError`."""
        prompts = sum(len(request.tokens) for request in self.requests[:: self.body.choices])
        most = prompts + sum(request.max_new_tokens for request in self.requests)
        taken = account.tokens(most)
        try:
            stream = self.stream = await self.service.submit(self.requests)
        except BaseException:
            taken.close()
            raise
        taken.used = prompts
        self.configuration = stream.configuration  # that of now, should it have changed
        if not self.body.stream:
            with closing(stream), closing(taken):
                return await self.complete(self._chunks(taken))
        return StreamingResponse(
            self.events(taken),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )

    async def _chunks(self, taken: WindowUse) -> AsyncIterator[tuple[int, Chunk]]:
        """What the engine adds, with the choice that it adds to. Raises :class:`ApiError`: it takes
        too long (408), or ends with an error (500)."""
        async for index, chunk in within(self.stream, self.service.access.limits.seconds):
            taken.used += len(chunk.tokens)
            if chunk.finished and (failure := chunk.finished.failure):
                raise ApiError(failure, status=500, type="server_error", code="no_numbers")
            yield index, chunk

    @cached_property
    def common(self) -> dict[str, Any]:
        """What all parts of the answer have; from when the engine has the requests."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.service.model,
            "system_fingerprint": self.configuration.id,
        }

    def counts(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """How the tokens came about."""
        said = SpecDec.of(generations, self.configuration, self.stream.arms)
        counts: dict[str, Any] = {"specdec": said}
        if self.configuration.drafter is not None:
            counts["metrics"] = AnswerMetrics.of(generations)
        return counts

    async def complete(self, chunks: AsyncIterator[tuple[int, Chunk]]) -> BaseModel:
        """The whole answer at once."""
        done = {index: chunk.finished async for index, chunk in chunks if chunk.finished}
        generations = [done[index] for index in sorted(done)]
        return self.whole(
            [self.choice(index, generation) for index, generation in enumerate(generations)],
            usage=Usage.of(generations, self.body.choices),
            **self.counts(generations),
        )

    async def events(self, taken: WindowUse) -> AsyncIterator[str]:
        """The answer as server-sent events, the choices' parts as they come. The last part of text
        carries the counts; usage follows if requested."""
        with closing(self.stream), closing(taken):
            try:
                async for part in self.parts(self._chunks(taken)):
                    yield event(part)
                yield self.end
            except EngineFailed:
                yield event(SERVER_ERROR.body)
            except ApiError as error:  # it took too long, or failed
                yield event(error.body)


class ChoicesAnswer(HttpAnswer[Body]):
    """One whose stream has parts of choices.

    A choice's opening comes with its first token, so that its time is the first token's. Where
    rounds are told, it comes with the first of them.
    """

    @abstractmethod
    def opening(self, index: int, prompt: Sequence[TokenLogprobs] | None) -> Choice | None:
        """What comes before a choice's first text in a stream, if anything does; with the prompt's
        log-probabilities, where they were asked for."""

    @abstractmethod
    def part(self, index: int, chunk: Chunk) -> Choice:
        """What a chunk adds to a choice in a stream."""

    @abstractmethod
    def event(self, choices: list[Any], **fields: Any) -> BaseModel:
        """An event of a stream with parts of choices."""

    async def _in_order(
        self, chunks: AsyncIterator[tuple[int, Chunk]]
    ) -> AsyncIterator[tuple[int, Chunk]]:
        """The same, but what comes first of a choice waits for every lower choice: client libraries
        append choices in the order in which they come."""
        opened, held = 0, list[tuple[int, Chunk]]()
        async for index, chunk in chunks:
            held.append((index, chunk))
            ready = {n for n, waits in held if waits.adds or self.body.traced}
            while opened in ready:
                opened += 1
            held.sort(key=lambda item: item[0])  # those of one choice stay in order
            while held and held[0][0] < opened:
                yield held.pop(0)

    async def parts(self, chunks: AsyncIterator[tuple[int, Chunk]]) -> AsyncIterator[BaseModel]:
        options = self.body.stream_options or StreamOptions()
        tokens_told = self.body.return_token_ids or self.body.tops is not None
        done: dict[int, Generation] = {}
        written = dict.fromkeys(range(len(self.requests)), 0)
        opened: set[int] = set()
        prompts: dict[int, list[TokenLogprobs] | None] = {}  # of the choices' first chunks
        rounds = Rounds(self.service, self.requests) if self.body.traced else None
        async for index, chunk in self._in_order(chunks):
            prompts[index] = chunk.prompt_logprobs or prompts.get(index)
            if not chunk.adds and rounds is None:
                continue
            written[index] += len(chunk.tokens)
            fields: dict[str, Any] = {}
            if options.continuous_usage_stats:
                prompt = len(self.requests[index].tokens)
                fields["usage"] = Usage.so_far(prompt, written[index])
            if index not in opened:
                opened.add(index)
                if (opening := self.opening(index, prompts[index])) is not None:
                    yield self.event([opening], **fields)
            if chunk.finished:
                done[index] = chunk.finished
                if len(done) == len(self.requests):
                    fields |= self.counts(list(done.values()))
            if rounds is not None:
                fields["round"] = rounds.of(index, chunk, self.stream.configuration)
            if chunk.text or chunk.finished or tokens_told or rounds is not None:
                yield self.event([self.part(index, chunk)], **fields)
        if options.include_usage:
            generations = [done[index] for index in sorted(done)]
            yield self.event([], usage=Usage.of(generations, self.body.choices))
