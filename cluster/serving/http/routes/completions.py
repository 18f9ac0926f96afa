"""OpenAI's completions: a text is continued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter

from cluster.serving.http.answer import ChoicesAnswer, respond
from cluster.serving.http.bodies import JsonRequest, JsonRoute
from cluster.serving.http.choices import choices
from cluster.serving.http.openapi import streamed
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
    routes = APIRouter(route_class=JsonRoute)

    @routes.post("/v1/completions", response_model=Completion, responses=streamed(Completion))
    async def completions(body: CompletionRequest, request: JsonRequest) -> Any:
        return await respond(service, request, body, CompletionAnswer)

    return routes


def _requests(service: Service, body: CompletionRequest) -> list[Request]:
    most, prompts = service.engine.max_length, []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            prompts.append(service.prompts.of_text(prompt, most, body.add_special_tokens))
        else:
            check_tokens(prompt, service.engine.vocab_size, "prompt")
            prompts.append(tuple(prompt))
    return choices(service, body, prompts, DEFAULT_MAX_TOKENS)


class CompletionAnswer(ChoicesAnswer[CompletionRequest]):
    prefix = "cmpl"

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        super().__init__(service, body, _requests(service, body))
        self._offsets = [0] * len(self.requests)  # of the next token's text

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
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(index, None, prompt),
            prompt_token_ids=tokens,
            token_ids=None if tokens is None else [],
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
        """The prompt, where the choice's text begins with it."""
        if not self.body.echo:
            return ""
        prompt = self.body.prompts[index // self.body.choices]
        return prompt if isinstance(prompt, str) else str(self.prompts.tokenizer.decode(prompt))

    def _prompt_tokens(self, index: int) -> list[int] | None:
        return list(self.requests[index].tokens) if self.body.return_token_ids else None

    def _logprobs(
        self,
        index: int,
        tokens: Sequence[TokenLogprobs] | None,
        prompt: Sequence[TokenLogprobs] | None = None,
    ) -> CompletionLogprobs | None:
        """The log-probabilities of new tokens, after those of the whole prompt if given."""
        if tokens is None and prompt is None:
            return None
        unknown = None if prompt is None else self.requests[index].tokens[0]
        known = [*(prompt or ()), *(tokens or ())]
        logprobs = self.prompts.texts.completion(known, self._offsets[index], unknown)
        self._offsets[index] += sum(map(len, logprobs.tokens))
        return logprobs
