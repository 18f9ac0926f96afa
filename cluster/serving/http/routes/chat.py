"""OpenAI's chat: messages are answered by a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest

from cluster.serving.http.answer import Answer
from cluster.serving.http.bodies import SMALL, read_body, soon
from cluster.serving.http.choices import choices
from cluster.serving.http.openapi import CHAT, body_of
from cluster.serving.http.service import Service
from cluster.serving.protocol.chat import (
    Answered,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Delta,
    DeltaChoice,
)
from cluster.serving.protocol.logprobs import ChatLogprobs
from specdec_core.engine import Chunk, Request
from specdec_core.tokens.statistics import Generation, TokenLogprobs


def router(service: Service) -> APIRouter:
    """`/v1/chat/completions`."""
    routes = APIRouter()

    def requests(body: ChatRequest) -> list[Request]:
        prompt = service.prompts.of_chat(body)
        return choices(service, body, [prompt], None, service.prompts.end_of_turn)

    @routes.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses=CHAT,
        openapi_extra=body_of(ChatRequest),
    )
    async def chat(request: HttpRequest) -> Any:
        content = await read_body(request)
        small = len(content) <= SMALL
        body = await soon(small, ChatRequest.from_body, content)
        service.check_model(body.model)
        asked = await soon(small and body.response_format is None, requests, body)
        return await ChatAnswer(service, body, asked).respond(request.state.account)

    return routes


class ChatAnswer(Answer[ChatRequest]):
    prefix = "chatcmpl"

    def choice(self, index: int, generation: Generation) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=Answered(content=generation.text),
            finish_reason=generation.ended,
            logprobs=self._logprobs(generation.logprobs),
            token_ids=generation.tokens if self.body.return_token_ids else None,
        )

    def opening(self, index: int, prompt: Sequence[TokenLogprobs] | None) -> DeltaChoice:
        told: list[int] | None = [] if self.body.return_token_ids else None
        return DeltaChoice(index=index, delta=Delta(role="assistant", content=""), token_ids=told)

    def part(self, index: int, chunk: Chunk) -> DeltaChoice:
        return DeltaChoice(
            index=index,
            delta=Delta(content=chunk.text or None),
            finish_reason=chunk.finished.ended if chunk.finished else None,
            logprobs=self._logprobs(chunk.logprobs),
            token_ids=chunk.tokens if self.body.return_token_ids else None,
        )

    def whole(self, choices: list[Any], **fields: Any) -> ChatCompletion:
        return ChatCompletion(
            choices=choices, prompt_token_ids=self._prompt_tokens, **self.common, **fields
        )

    def event(self, choices: list[Any], **fields: Any) -> ChatChunk:
        opens = any(choice.delta.role for choice in choices)
        return ChatChunk(
            choices=choices,
            prompt_token_ids=self._prompt_tokens if opens else None,
            **self.common,
            **fields,
        )

    @property
    def _prompt_tokens(self) -> list[int] | None:
        return list(self.requests[0].tokens) if self.body.return_token_ids else None

    def _logprobs(self, tokens: Sequence[TokenLogprobs] | None) -> ChatLogprobs | None:
        return None if tokens is None else self.prompts.texts.chat(tokens)
