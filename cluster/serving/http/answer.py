"""The answer to a request that generates text: whole, or as server-sent events. A subclass for each
protocol makes its parts."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any, Generic, TypeVar

from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.serving.engine_loop import EngineFailed
from cluster.serving.http.access import ACCOUNT
from cluster.serving.http.bodies import JsonRequest, run
from cluster.serving.http.limits import Account, Deadline, WindowUse, within
from cluster.serving.http.rounds import Rounds, StreamedRound
from cluster.serving.http.service import Service
from cluster.serving.protocol.counts import SpecDec, Usage
from cluster.serving.protocol.errors import SERVER_ERROR, ApiError
from cluster.serving.protocol.fields import StreamOptions, optional
from cluster.serving.protocol.generation import GenerationRequest
from cluster.serving.stream import Stream
from specdec_core.engine import Chunk, Request
from specdec_core.tokens.statistics import Generation, TokenLogprobs

_DONE = "data: [DONE]\n\n"
# JSON does not escape these characters, but clients that split lines as Python does break at them.
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
_SLOW = frozenset({"response_format", "text", "tools"})  # fields that need a compiled grammar

Body = TypeVar("Body", bound=GenerationRequest)
T = TypeVar("T")
Chunks = AsyncIterator[tuple[int, Chunk]]  # with the index of their choice


async def respond(
    service: Service,
    request: JsonRequest,
    body: Any,
    answer: Callable[[Service, Any], HttpAnswer[Any]],
) -> Any:
    """Answer a request. Tokenising a long prompt, or compiling a grammar, takes a while: that is
    not done on the event loop. Raises :class:`ApiError`."""
    service.check_model(body.model)
    quick = request.small and body.model_fields_set.isdisjoint(_SLOW)
    account: Account = getattr(request.state, ACCOUNT)
    try:
        prepared = await run(answer, service, body, quick=quick)
        return await while_connected(request, prepared.respond(account))
    except ApiError as error:
        raise error.named(body.names) from None


async def while_connected(request: HttpRequest, answering: Coroutine[Any, Any, T]) -> T | Response:
    """The result of `answering`, which is cancelled when the client disconnects. uvicorn only tells
    of that, and an answer that is sent at once does not ask."""
    task, left = asyncio.ensure_future(answering), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=499)
    finally:
        task.cancel()
        left.cancel()


class GenerationAnswer(BaseModel):
    """A whole answer, or one event of a stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str  # the configuration's id
    usage: Usage | None = None
    specdec: SpecDec | None = optional()
    round: StreamedRound | None = optional()  # of an event


class HttpAnswer(ABC, Generic[Body]):
    """The answer to one body. `requests` are the engine's, one for each choice."""

    prefix: str  # of ids
    end = _DONE  # of a stream
    stream: Stream  # from when the engine has the requests

    def __init__(self, service: Service, body: Body, requests: Sequence[Request]) -> None:
        self.service, self.body, self.requests = service, body, requests
        self.configuration, self.prompts = service.engine.configuration, service.prompts
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    @abstractmethod
    def choice(self, index: int, generation: Generation) -> BaseModel:
        """A whole choice."""

    def asked(self, chunk: Chunk) -> list[TokenLogprobs] | None:
        """A chunk's log-probabilities, if the request asks for them: the engine has them for the
        rounds, too."""
        return None if self.body.tops is None else chunk.logprobs

    @abstractmethod
    def whole(self, choices: list[Any], **fields: Any) -> BaseModel:
        """The answer with these choices."""

    @abstractmethod
    def parts(self, chunks: Chunks) -> AsyncIterator[BaseModel]:
        """The events of a stream. The engine has the requests when it is read."""

    async def respond(self, account: Account) -> BaseModel | StreamingResponse:
        """Submit the requests to the engine, and answer. Raises :class:`ApiError`."""
        prompts = sum(len(request.tokens) for request in self.requests[:: self.body.choices])
        taken = account.tokens(prompts + sum(request.max_new_tokens for request in self.requests))
        self.deadline = Deadline.of(self.service.access.limits.seconds)
        try:
            async with self.deadline.kept():  # an engine may be loaded first
                stream = self.stream = await self.service.submit(self.requests)
        except BaseException:
            taken.close()
            raise
        taken.used = prompts
        self.configuration = stream.configuration  # it may just have been replaced
        if self.service.samples is not None:
            self.service.samples.offer(self.body, self.prompts.tokenizer)
        if not self.body.stream:
            with closing(stream), closing(taken):
                return await self.complete(self._chunks(taken))
        return StreamingResponse(
            self.events(taken),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )

    async def _chunks(self, taken: WindowUse) -> Chunks:
        """The engine's chunks. Raises :class:`ApiError` where the answer takes too long (408), or
        ends with an error (500)."""
        async for index, chunk in within(self.stream, self.deadline):
            taken.used += len(chunk.tokens)
            if chunk.finished and (failure := chunk.finished.failure):
                raise ApiError(failure, status=500, type="server_error", code="no_numbers")
            yield index, chunk

    @cached_property
    def common(self) -> dict[str, Any]:
        """The fields of all parts of the answer, from when the engine has the requests."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.service.model,
            "system_fingerprint": self.configuration.id,
        }

    def counts(self, generations: Sequence[Generation]) -> SpecDec:
        """The counts of decoding."""
        return SpecDec.of(generations, self.configuration, self.stream.arms)

    async def complete(self, chunks: Chunks) -> BaseModel:
        """The whole answer."""
        done = {index: chunk.finished async for index, chunk in chunks if chunk.finished}
        generations = [done[index] for index in sorted(done)]
        return self.whole(
            [self.choice(index, generation) for index, generation in enumerate(generations)],
            usage=Usage.of(generations, self.body.choices),
            specdec=self.counts(generations),
        )

    async def events(self, taken: WindowUse) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        with closing(self.stream), closing(taken):
            try:
                async for part in self.parts(self._chunks(taken)):
                    yield event(part)
                yield self.end
            except EngineFailed:
                yield event(SERVER_ERROR.body)
            except ApiError as error:
                yield event(error.body)


class ChoicesAnswer(HttpAnswer[Body]):
    """An answer with a stream of parts of choices.

    A choice's opening comes with its first token, so that the time to first token is measured on
    the opening. With rounds, it comes with the first round. The last part of text carries the
    counts; usage follows if requested.
    """

    @abstractmethod
    def opening(self, index: int, prompt: Sequence[TokenLogprobs] | None) -> BaseModel | None:
        """What precedes a choice's first text in a stream; with the prompt's log-probabilities,
        where they were asked for."""

    @abstractmethod
    def part(self, index: int, chunk: Chunk) -> BaseModel:
        """What a chunk adds to a choice in a stream."""

    @abstractmethod
    def event(self, choices: list[Any], **fields: Any) -> BaseModel:
        """An event of a stream with parts of choices."""

    async def _in_order(self, chunks: Chunks) -> Chunks:
        """The chunks. The first chunk of a choice waits for the first chunk of every lower choice:
        client libraries append choices in the order in which they come."""
        opened, held = 0, list[tuple[int, Chunk]]()
        async for index, chunk in chunks:
            held.append((index, chunk))
            ready = {n for n, waits in held if waits.adds or self.body.traced}
            while opened in ready:
                opened += 1
            held.sort(key=lambda item: item[0])  # chunks of one choice stay in order
            while held and held[0][0] < opened:
                yield held.pop(0)

    async def parts(self, chunks: Chunks) -> AsyncIterator[BaseModel]:
        options = self.body.stream_options or StreamOptions()
        has_tokens = self.body.return_token_ids or self.body.tops is not None
        rounds = Rounds(self.service, self.requests) if self.body.traced else None
        written = [0] * len(self.requests)  # tokens
        prompts: dict[int, list[TokenLogprobs]] = {}
        opened: set[int] = set()
        done: dict[int, Generation] = {}
        async for index, chunk in self._in_order(chunks):
            if chunk.prompt_logprobs is not None:  # a prompt of one token has none
                prompts[index] = chunk.prompt_logprobs
            if not chunk.adds and rounds is None:
                continue
            written[index] += len(chunk.tokens)
            fields: dict[str, Any] = {}
            if options.continuous_usage_stats:
                prompt = len(self.requests[index].tokens)
                fields["usage"] = Usage.so_far(prompt, written[index])
            if index not in opened:
                opened.add(index)
                if (opening := self.opening(index, prompts.get(index))) is not None:
                    yield self.event([opening], **fields)
            if chunk.finished:
                done[index] = chunk.finished
                if len(done) == len(self.requests):
                    fields["specdec"] = self.counts(list(done.values()))
            if rounds is not None:
                fields["round"] = rounds.of(index, chunk, self.stream.configuration)
            if chunk.text or chunk.finished or has_tokens or rounds is not None:
                yield self.event([self.part(index, chunk)], **fields)
        if options.include_usage:
            generations = [done[index] for index in sorted(done)]
            yield self.event([], usage=Usage.of(generations, self.body.choices))


def event(value: BaseModel) -> str:
    """The server-sent event with this value. Its data is one line, however lines are split. A
    value with a type gives the event its name."""
    kind = getattr(value, "type", None)
    name = f"event: {kind}\n" if kind else ""
    return f"{name}data: {value.model_dump_json().translate(_LINE_ENDS)}\n\n"
