"""OpenAI's completions: a text goes on."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from starlette.requests import Request as HttpRequest

from cluster.serving.engine_loop import EngineFailed
from cluster.serving.engine_process import EngineProcess
from cluster.serving.http.bodies import read_body
from cluster.serving.http.openapi import COMPLETION, COMPLETION_REQUEST
from cluster.serving.http.service import CompletionService
from cluster.serving.protocol.completions import Completion, CompletionChoice, CompletionRequest
from cluster.serving.protocol.counts import SpecDec, Usage
from cluster.serving.protocol.errors import SERVER_ERROR, ApiError
from cluster.serving.stream import Stream
from specdec_core.config import Configuration
from specdec_core.engine import Engine, Request
from specdec_core.tokens.statistics import Generation

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def router(service: CompletionService) -> APIRouter:
    """`/v1/completions`."""
    routes, completions = APIRouter(), _Completions(service)

    @routes.post(
        "/v1/completions",
        response_model=Completion,
        responses=COMPLETION,
        openapi_extra=COMPLETION_REQUEST,
    )
    async def complete(request: HttpRequest) -> Any:
        # The body is read here so that curl without a content type works and errors are OpenAI's.
        body = await asyncio.to_thread(CompletionRequest.from_body, await read_body(request))
        service.check_model(body.model)
        # Encoding a long prompt takes a while: not on the event loop.
        requests = await asyncio.to_thread(completions.requests, body)
        submission = await service.submit(requests)
        if not body.stream:
            return await completions.complete(body, submission)
        return StreamingResponse(
            completions.events(body, submission),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )

    return routes


class _Completions:
    def __init__(self, service: CompletionService) -> None:
        self.service = service

    @property
    def engine(self) -> Engine | EngineProcess:
        return self.service.engine

    def requests(self, body: CompletionRequest) -> list[Request]:
        """One engine request for each prompt. Raises :class:`ApiError`."""
        requests = []
        for prompt, seed in zip(body.prompts, seeds(body.seed), strict=False):
            tokens = self.engine.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
            room = max(self.engine.max_length - len(tokens), 1)
            max_new_tokens = body.max_tokens or min(DEFAULT_MAX_TOKENS, room)
            if len(tokens) + max_new_tokens > self.engine.max_length:
                raise ApiError(
                    f"this model's context holds {self.engine.max_length} tokens, but the prompt"
                    f" has {len(tokens)} and max_tokens is {max_new_tokens}",
                    param="prompt" if len(tokens) >= self.engine.max_length else "max_tokens",
                    code="context_length_exceeded",
                )
            requests.append(
                Request(
                    id=uuid.uuid4().hex,
                    tokens=tokens,
                    max_new_tokens=max_new_tokens,
                    sampling=body.sampling(self.engine.configuration.sampling),
                    seed=seed,
                    stop=body.stops,
                    ignore_eos=bool(body.ignore_eos),
                )
            )
        return requests

    def echoed(self, body: CompletionRequest) -> list[str]:
        """The beginning of each choice's text."""
        if not body.echo:
            return [""] * len(body.prompts)
        decode = self.engine.pair.tokenizer.decode
        return [p if isinstance(p, str) else str(decode(p)) for p in body.prompts]

    def completion(self, configuration: Configuration, **fields: Any) -> Completion:
        return Completion(
            id=f"cmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.service.model,
            system_fingerprint=configuration.id,
            **fields,
        )

    async def complete(self, body: CompletionRequest, submission: Stream) -> Completion:
        """The whole answer at once."""
        with closing(submission):
            done = {index: chunk.finished async for index, chunk in submission if chunk.finished}
        generations = [done[index] for index in sorted(done)]
        echoed = self.echoed(body)
        return self.completion(
            submission.configuration,
            choices=[
                CompletionChoice(index=i, text=echoed[i] + g.text, finish_reason=g.finish_reason)
                for i, g in enumerate(generations)
            ],
            usage=Usage.of(generations),
            specdec=SpecDec.of(generations, submission.configuration),
        )

    async def events(self, body: CompletionRequest, submission: Stream) -> AsyncIterator[str]:
        """The answer as server-sent events, the choices' chunks as they come. The last chunk of
        text carries `specdec`; usage follows if requested."""
        answer = self.completion(submission.configuration, choices=[])
        generations: list[Generation] = []

        def event(choices: list[CompletionChoice], **fields: Any) -> str:
            part = answer.model_copy(update={"choices": choices, **fields})
            return f"data: {part.model_dump_json()}\n\n"

        with closing(submission):
            try:
                for index, text in enumerate(self.echoed(body)):
                    if text:
                        yield event([CompletionChoice(index=index, text=text)])
                async for index, chunk in submission:
                    choice = CompletionChoice(index=index, text=chunk.text)
                    fields = {}
                    if chunk.finished:
                        choice.finish_reason = chunk.finished.finish_reason
                        generations.append(chunk.finished)
                        if len(generations) == len(body.prompts):
                            fields["specdec"] = SpecDec.of(generations, submission.configuration)
                    if chunk.text or chunk.finished:
                        yield event([choice], **fields)
                if body.stream_options and body.stream_options.include_usage:
                    yield event([], usage=Usage.of(generations))
                yield "data: [DONE]\n\n"
            except EngineFailed:
                yield f"data: {SERVER_ERROR.body.model_dump_json()}\n\n"


def seeds(seed: int | None) -> Iterator[int]:
    """The seeds of a request's choices, each with a random stream of its own: the first one's is
    `seed`, or without one a random number, and the others follow from it."""
    first = secrets.randbits(63) if seed is None else seed
    yield first
    others = random.Random(f"choices {first}")
    while True:
        yield others.getrandbits(63)
