"""OpenAI's chat: messages are answered by a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter

from cluster.serving.http.answer import ChoicesAnswer, respond
from cluster.serving.http.bodies import JsonRequest, JsonRoute
from cluster.serving.http.choices import choices
from cluster.serving.http.openapi import streamed
from cluster.serving.http.service import Service
from cluster.serving.protocol.chat import (
    Answered,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Delta,
    DeltaChoice,
    FinishReason,
)
from cluster.serving.protocol.errors import ApiError
from cluster.serving.protocol.logprobs import ChatLogprobs
from cluster.serving.protocol.tools import CallReader, CallSyntax, ToolCall, ToolCallDelta
from specdec_core.engine import Chunk, Request
from specdec_core.tokens.statistics import Generation, TokenLogprobs


def router(service: Service) -> APIRouter:
    """`/v1/chat/completions`."""
    routes = APIRouter(route_class=JsonRoute)

    @routes.post(
        "/v1/chat/completions", response_model=ChatCompletion, responses=streamed(ChatChunk)
    )
    async def chat(body: ChatRequest, request: JsonRequest) -> Any:
        return await respond(service, request, body, ChatAnswer)

    return routes


def chat_requests(service: Service, body: ChatRequest) -> list[Request]:
    """The engine's requests for a chat. Raises :class:`ApiError`."""
    prompts = service.prompts
    prompt = prompts.of_chat(body, service.engine.max_length)
    shown: frozenset[int] = frozenset()
    if body.offered and not body.required:
        if prompts.call_syntax is None:
            raise ApiError(
                "tools: in what format this model writes calls is not known here; with tool_choice"
                ' "required", or a tool\'s name, it writes JSON',
                param="tools",
                code="tools_not_supported",
            )
        shown = prompts.call_marks
    return choices(service, body, [prompt], None, shown)


class ChatAnswer(ChoicesAnswer[ChatRequest]):
    prefix = "chatcmpl"

    def __init__(self, service: Service, body: ChatRequest) -> None:
        super().__init__(service, body, chat_requests(service, body))
        # A required call is JSON and nothing else.
        syntax = CallSyntax() if body.required else self.prompts.call_syntax
        parallel = body.parallel_tool_calls is not False
        self._readers = [
            CallReader(syntax, body.offered, parallel) if syntax and body.offered else None
            for _ in self.requests
        ]
        self._prompt_tokens = list(self.requests[0].tokens) if body.return_token_ids else None

    def choice(self, index: int, generation: Generation) -> ChatChoice:
        text, calls, reason = self._read(index, generation.text, generation)
        assert reason is not None
        return ChatChoice(
            index=index,
            message=Answered(content=text or (None if calls else ""), tool_calls=calls or None),
            finish_reason=reason,
            logprobs=self._logprobs(generation.logprobs),
            token_ids=generation.tokens if self.body.return_token_ids else None,
        )

    def opening(self, index: int, prompt: Sequence[TokenLogprobs] | None) -> DeltaChoice:
        tokens: list[int] | None = [] if self.body.return_token_ids else None
        return DeltaChoice(index=index, delta=Delta(role="assistant", content=""), token_ids=tokens)

    def part(self, index: int, chunk: Chunk) -> DeltaChoice:
        reader = self._readers[index]
        before = reader.count if reader else 0
        text, calls, reason = self._read(index, chunk.text, chunk.finished)
        deltas = [
            ToolCallDelta(index=n, id=call.id, function=call.function)
            for n, call in enumerate(calls, before)
        ]
        return DeltaChoice(
            index=index,
            delta=Delta(content=text or None, tool_calls=deltas or None),
            finish_reason=reason,
            logprobs=self._logprobs(chunk.logprobs),
            token_ids=chunk.tokens if self.body.return_token_ids else None,
        )

    def whole(self, choices: list[Any], **fields: Any) -> ChatCompletion:
        tokens = self._prompt_tokens
        return ChatCompletion(choices=choices, prompt_token_ids=tokens, **self.common, **fields)

    def event(self, choices: list[Any], **fields: Any) -> ChatChunk:
        opens = any(choice.delta.role for choice in choices)
        tokens = self._prompt_tokens if opens else None
        return ChatChunk(choices=choices, prompt_token_ids=tokens, **self.common, **fields)

    def _read(
        self, index: int, text: str, finished: Generation | None
    ) -> tuple[str, list[ToolCall], FinishReason | None]:
        """The text of a choice without its calls, the calls, and why the choice ends."""
        reason: FinishReason | None = finished.ended if finished else None
        if (reader := self._readers[index]) is None:
            return text, [], reason
        plain, calls = reader.push(text, finished is not None)
        return plain, calls, "tool_calls" if reason == "stop" and reader.count else reason

    def _logprobs(self, tokens: Sequence[TokenLogprobs] | None) -> ChatLogprobs | None:
        return None if tokens is None else self.prompts.texts.chat(tokens)
