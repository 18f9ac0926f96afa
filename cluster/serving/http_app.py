"""The HTTP face of an engine: OpenAI's completions protocol as a FastAPI application.

It needs an :class:`EngineLoop` and nothing of Ray, so it runs under any ASGI server.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from cluster.serving.engine_loop import QUEUE, EngineFailed, EngineLoop, QueueFull, Submission
from cluster.serving.engine_process import EngineProcess
from cluster.serving.openai_protocol import (
    MAX_BODY_BYTES,
    ApiError,
    Arm,
    Completion,
    CompletionChoice,
    CompletionRequest,
    Health,
    ModelCard,
    ModelList,
    SpecDec,
    Usage,
)
from cluster.serving.openapi import (
    ANYWHERE,
    COMPLETION,
    COMPLETION_REQUEST,
    MODEL,
    MODEL_NAME,
    PLAIN,
    describe_request,
)
from specdec_core.base.errors import UserError
from specdec_core.drafting.states import load_state, save_state
from specdec_core.engine import Engine, Request
from specdec_core.tokens.statistics import Generation

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 16  # OpenAI's
KEEP_SECONDS = 60  # between copies of what was learned while serving


class CompletionService:
    """Answers completion requests under one model name.

    A bandit with memory of all requests learns from them. With `learned`, it starts from that file,
    if it exists, and saves its state there. While `queue` requests wait, others are refused. The
    engine's threads run on the CPU cores `cores`, if given.
    """

    def __init__(
        self,
        engine: Engine | EngineProcess,
        model: str,
        learned: Path | None = None,
        queue: int = QUEUE,
        cores: Sequence[int] = (),
    ) -> None:
        self.engine, self.model = engine, model
        self.loop = EngineLoop(engine, queue, cores)
        self.started = int(time.time())
        self.learned = learned
        if engine.drafter is not None and learned is not None and learned.exists():
            engine.drafter.load(load_state(learned), str(learned))
        self._kept = self.state()  # what the file has

    def state(self) -> dict[str, Any] | None:
        """The drafter's state that lasts over requests."""
        return None if self.engine.drafter is None else self.engine.drafter.state()

    def keep_learned(self) -> None:
        """Save what the drafter has learned since it was saved last."""
        if self.loop.failure:  # what it has learned is lost, or of no worth
            return
        state = self.state()
        if state is None or self.learned is None or state == self._kept:
            return
        try:
            save_state(state, self.learned)
        except OSError as error:
            logger.warning("%s: what was learned is not saved: %s", self.learned, error.strerror)
        self._kept = state

    def close(self) -> None:
        """End the engine's process, if it has one of its own."""
        if isinstance(self.engine, EngineProcess):
            self.engine.close()

    async def keep_learning(self) -> None:
        """Save it periodically, so that little is lost however the server ends."""
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            await self.loop.between_steps(self.keep_learned)

    async def health(self) -> Health:
        """Whether requests are answered, and by what."""
        with suppress(EngineFailed):
            self.loop.check()
        configuration, status = self.engine.configuration, self.engine.status()
        health = Health(
            ready=self.loop.failure is None,
            model=self.model,
            configuration=configuration.id,
            label=configuration.label,
            lossless=configuration.lossless,
            slots=self.engine.slots,
            queue=self.loop.queue,
            max_length=self.engine.max_length,
            running=self.loop.running,
            waiting=self.loop.waiting,
            preemptions=status.preemptions,
            prefix_hits=status.prefix_hits,
            prefix_tokens=status.prefix_tokens,
            cancelled=self.loop.cancelled,
        )
        drafter = self.engine.drafter
        if drafter is not None and health.ready:
            arms = await self.loop.between_steps(drafter.learned)
            if arms is not None:
                health.arms = [Arm(**arm) for arm in arms]
        return health

    def limits(self) -> dict[str, dict[str, Any]]:
        """The limits in the schemas of a request's parts, for the served pair."""
        most = self.engine.max_length - 1
        return {
            "ModelName": {"enum": [self.model]},
            "NewTokens": {"maximum": most},
            "TokenId": {"minimum": 0, "maximum": self.engine.vocab_size - 1},
            "TokenIds": {"maxItems": most},
        }

    def check_model(self, name: str | None) -> None:
        """Raises :class:`ApiError` (404) for a model that is not served here."""
        if name not in (None, self.model):
            raise ApiError(
                f"the model {name!r} does not exist; {self.model!r} is served here",
                status=404,
                param="model",
                code="model_not_found",
            )

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

    async def submit(self, body: CompletionRequest) -> Submission:
        """Put the request's prompts into the engine. Raises :class:`ApiError`."""
        self.check_model(body.model)
        # Encoding a long prompt takes a while: not on the event loop.
        requests = await asyncio.to_thread(self.requests, body)
        try:
            return await self.loop.submit(requests)
        except UserError as error:
            raise ApiError(str(error), param="prompt") from None
        except QueueFull as full:
            raise ApiError(
                str(full),
                status=429,
                code="rate_limit_exceeded",
                type="rate_limit_error",
                headers={"Retry-After": str(full.seconds)},
            ) from None

    def echoed(self, body: CompletionRequest) -> list[str]:
        """The beginning of each choice's text."""
        if not body.echo:
            return [""] * len(body.prompts)
        decode = self.engine.pair.tokenizer.decode
        return [p if isinstance(p, str) else str(decode(p)) for p in body.prompts]

    def completion(self, **fields: Any) -> Completion:
        return Completion(
            id=f"cmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.model,
            system_fingerprint=self.engine.configuration.id,
            **fields,
        )

    def specdec(self, generations: list[Generation]) -> SpecDec:
        return SpecDec.of(generations, self.engine.configuration)

    async def complete(self, body: CompletionRequest, submission: Submission) -> Completion:
        """The whole answer at once."""
        with closing(submission):
            done = {index: chunk.finished async for index, chunk in submission if chunk.finished}
        generations = [done[index] for index in sorted(done)]
        echoed = self.echoed(body)
        return self.completion(
            choices=[
                CompletionChoice(index=i, text=echoed[i] + g.text, finish_reason=g.finish_reason)
                for i, g in enumerate(generations)
            ],
            usage=Usage.of(generations),
            specdec=self.specdec(generations),
        )

    async def events(self, body: CompletionRequest, submission: Submission) -> AsyncIterator[str]:
        """The answer as server-sent events, the choices' chunks as they come. The last chunk of
        text carries `specdec`; usage follows if requested."""
        answer = self.completion(choices=[])
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
                            fields["specdec"] = self.specdec(generations)
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


SERVER_ERROR = ApiError("the server failed to answer", status=500, type="server_error")


def build_app(service: CompletionService) -> FastAPI:
    """Routes and error shapes; the application's lifespan runs the engine."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.loop:
            keeping = asyncio.create_task(service.keep_learning())
            try:
                yield
            finally:
                keeping.cancel()
        service.keep_learned()
        service.close()

    app = FastAPI(title="specdec", lifespan=lifespan, responses=ANYWHERE, redirect_slashes=False)

    @app.exception_handler(ApiError)
    async def refuse(_: HttpRequest, error: ApiError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: HttpRequest, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return answer(ApiError(message, status=error.status_code, headers=error.headers))

    @app.exception_handler(Exception)
    async def fail(_: HttpRequest, error: Exception) -> JSONResponse:
        logger.error("a request failed", exc_info=error)
        return answer(SERVER_ERROR)

    @app.get(
        "/health",
        responses={503: {"model": Health, "description": "The engine failed.", "content": PLAIN}},
        response_model_exclude_unset=True,
    )
    async def health(response: Response) -> Health:
        health = await service.health()
        response.status_code = 200 if health.ready else 503
        return health

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[ModelCard(id=service.model, created=service.started)])

    @app.get("/v1/models/{name:path}", responses=MODEL, openapi_extra=MODEL_NAME)
    async def model(request: HttpRequest) -> ModelCard:
        service.check_model(request.path_params["name"])
        return ModelCard(id=service.model, created=service.started)

    @app.post(
        "/v1/completions",
        response_model=Completion,
        responses=COMPLETION,
        openapi_extra=COMPLETION_REQUEST,
    )
    async def completions(request: HttpRequest) -> Any:
        # The body is read here so that curl without a content type works and errors are OpenAI's.
        body = await asyncio.to_thread(CompletionRequest.from_body, await read_body(request))
        submission = await service.submit(body)
        if not body.stream:
            return await service.complete(body, submission)
        return StreamingResponse(
            service.events(body, submission),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )

    describe_request(app, service.limits())
    return app


def answer(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body.model_dump(), error.status, error.headers)


async def read_body(request: HttpRequest) -> bytes:
    """The body, up to a limit. Raises :class:`ApiError` (413)."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
    return bytes(body)
