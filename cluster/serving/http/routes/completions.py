"""OpenAI's completions: a text goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest

from cluster.serving.http.answer import ChoicesAnswer
from cluster.serving.http.bodies import SMALL, read_body, soon
from cluster.serving.http.choices import choices
from cluster.serving.http.openapi import COMPLETION, body_of
from cluster.serving.http.service import Service
from cluster.serving.protocol.completions import (
    DEFAULT_MAX_TOKENS,
    Completion,
    CompletionChoice,
    CompletionRequest,
)
from cluster.serving.protocol.generation import check_tokens
from cluster.serving.protocol.logprobs import CompletionLogprobs
from specdec_core.engine import Chunk, Request
from specdec_core.tokens.statistics import Generation, TokenLogprobs


def router(service: Service) -> APIRouter:
    """`/v1/completions`."""
    routes = APIRouter()

    def requests(body: CompletionRequest) -> list[Request]:
        for prompt in body.prompts:
            if not isinstance(prompt, str):
                check_tokens(prompt, service.engine.vocab_size, "prompt")
        prompts = [
            service.prompts.of_text(prompt, service.engine.max_length, body.add_special_tokens)
            if isinstance(prompt, str)
            else tuple(prompt)
            for prompt in body.prompts
        ]
        return choices(service, body, prompts, DEFAULT_MAX_TOKENS)

    @routes.post(
        "/v1/completions",
        response_model=Completion,
        responses=COMPLETION,
        openapi_extra=body_of(CompletionRequest),
    )
    async def completions(request: HttpRequest) -> Any:
        # The body is read here so that curl without a content type works and errors are OpenAI's.
        content = await read_body(request)
        small = len(content) <= SMALL
        body = await soon(small, CompletionRequest.from_body, content)
        service.check_model(body.model)
        # Encoding a long prompt, or compiling a grammar, takes a while: not on the event loop.
        asked = await soon(small and body.response_format is None, requests, body)
        return await CompletionAnswer(service, body, asked).respond(request.state.account)

    return routes


class CompletionAnswer(ChoicesAnswer[CompletionRequest]):
    prefix = "cmpl"

    def __init__(
        self, service: Service, body: CompletionRequest, requests: Sequence[Request]
    ) -> None:
        super().__init__(service, body, requests)
        self._offsets = [0] * len(requests)  # of the next token's text

    def choice(self, index: int, generation: Generation) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=self._echoed(index) + generation.text,
            finish_reason=generation.ended,
            logprobs=self._logprobs(index, generation.logprobs, generation.prompt_logprobs),
            token_ids=generation.tokens if self.body.return_token_ids else None,
            prompt_token_ids=self._prompt_tokens(index),
        )

    def opening(
        self, index: int, prompt: Sequence[TokenLogprobs] | None
    ) -> CompletionChoice | None:
        text, tokens = self._echoed(index), self._prompt_tokens(index)
        if not text and tokens is None and prompt is None:
            return None
        told: list[int] | None = None if tokens is None else []
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(index, None, prompt),
            prompt_token_ids=tokens,
            token_ids=told,
        )

    def part(self, index: int, chunk: Chunk) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=chunk.text,
            finish_reason=chunk.finished.ended if chunk.finished else None,
            logprobs=self._logprobs(index, chunk.logprobs),
            token_ids=chunk.tokens if self.body.return_token_ids else None,
        )

    def whole(self, choices: list[Any], **fields: Any) -> Completion:
        return Completion(choices=choices, **self.common, **fields)

    event = whole

    def _echoed(self, index: int) -> str:
        """The beginning of a choice's text."""
        if not self.body.echo:
            return ""
        prompt = self.body.prompts[index // self.body.choices]
        if isinstance(prompt, str):
            return prompt
        return str(self.prompts.tokenizer.decode(prompt))

    def _prompt_tokens(self, index: int) -> list[int] | None:
        return list(self.requests[index].tokens) if self.body.return_token_ids else None

    def _logprobs(
        self,
        index: int,
        tokens: Sequence[TokenLogprobs] | None,
        prompt: Sequence[TokenLogprobs] | None = None,
    ) -> CompletionLogprobs | None:
        """Those of new tokens, behind those of the whole prompt where these are told."""
        if tokens is None and prompt is None:
            return None
        unknown = None if prompt is None else self.requests[index].tokens[0]
        known = [*(prompt or ()), *(tokens or ())]
        logprobs = self.prompts.texts.completion(known, self._offsets[index], unknown)
        self._offsets[index] += sum(map(len, logprobs.tokens))
        return logprobs
