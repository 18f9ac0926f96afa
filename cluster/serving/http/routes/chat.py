"""OpenAI's `/v1/chat/completions`; see :mod:`cluster.serving.http.routes.completions`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from cluster.serving.http.answer import ChoicesAnswer, GenerationAnswer
from cluster.serving.http.choices import choices
from cluster.serving.http.service import Service
from cluster.serving.protocol.errors import ApiError, conflict
from cluster.serving.protocol.fields import (
    Empty,
    Labels,
    NewTokens,
    No,
    Part,
    Tops,
    neutral,
    optional,
)
from cluster.serving.protocol.generation import GenerationRequest
from cluster.serving.protocol.logprobs import ChatLogprobs
from cluster.serving.protocol.messages import Content, Rendered
from cluster.serving.protocol.tools import (
    CallReader,
    CallSyntax,
    NamedTool,
    Tool,
    ToolCall,
    ToolCallDelta,
    call_grammar,
)
from specdec_core.engine import Chunk, Request
from specdec_core.prompts.prompt import Prompt
from specdec_core.tokens.grammar import Grammar
from specdec_core.tokens.statistics import Generation, TokenLogprobs

FinishReason = Literal["stop", "length", "tool_calls"]


class Prediction(Part):
    """A hint at the answer, which never changes it."""

    type: Literal["content"]
    content: Content


class ChatRequest(Rendered, GenerationRequest, Labels):
    """The body of `POST /v1/chat/completions`."""

    max_completion_tokens: NewTokens | None = None
    max_tokens: NewTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Tops | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    # Fields with neutral values, which clients send.
    functions: Empty | None = neutral("[]; functions are given as tools")
    function_call: Literal["none", "auto"] | None = neutral(
        '"none" or "auto"; tool_choice says which tool is called'
    )
    store: No | None = neutral("false; nothing is stored here")
    modalities: Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True)] | None = (
        neutral('["text"]; others are not supported')
    )
    audio: None = neutral("null; audio is not supported")
    web_search_options: None = neutral("null; there is no web search")
    reasoning_effort: Literal["none", "medium"] | None = neutral(
        '"none" or "medium"; a template that reads others takes them from chat_template_kwargs'
    )
    verbosity: Literal["medium"] | None = neutral('"medium"; others are not supported')

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        least, most = self.max_tokens, self.max_completion_tokens
        if None not in (least, most) and least != most:
            reason = f"{least} is not max_completion_tokens, which is {most}: one of them is enough"
            raise conflict("max_tokens", reason)
        if self.top_logprobs and not self.logprobs:
            raise conflict("top_logprobs", "needs logprobs: true")
        if self.offered and super().grammar:
            reason = "does not go together with tools: a call has a format of its own"
            raise conflict("response_format", reason)
        if self.tool_choice not in (None, "none", "auto") and not self.required:
            raise conflict("tool_choice", "there is no such tool among tools")
        return self

    @property
    def names(self) -> dict[str, str]:
        return {"prompt": "messages"} | (
            {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        )

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def tops(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def required(self) -> list[Tool]:
        """The tools when the model must call one; empty where it may answer without a call."""
        if isinstance(choice := self.tool_choice, NamedTool):
            return [tool for tool in self.offered if tool.function.name == choice.function.name]
        return self.offered if choice == "required" else []

    @property
    def grammar(self) -> tuple[str, Grammar] | None:
        """The grammar of a required call, or of the answer's format."""
        return ("tools", call_grammar(self.required)) if self.required else super().grammar

    def sampled_prompts(self, tokenizer: Any) -> list[Prompt]:
        messages = tuple(message.message for message in self.messages)
        # Other chats are begun answers, or have more than their messages.
        if messages[-1].role != "user" or not self.has_only_text:
            return []
        return [Prompt(uuid.uuid4().hex, messages[-1].content, messages=messages)]


class Answered(BaseModel):
    """The message that answers."""

    role: Literal["assistant"] = "assistant"
    content: str | None  # null beside tool calls without text
    refusal: None = None
    tool_calls: list[ToolCall] | None = optional()


class ChatChoice(BaseModel):
    index: int
    message: Answered
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    token_ids: list[int] | None = optional()


class ChatCompletion(GenerationAnswer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = optional()


class Delta(BaseModel):
    role: Literal["assistant"] | None = optional()
    content: str | None = optional()
    tool_calls: list[ToolCallDelta] | None = optional()


class DeltaChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | None = optional()


class ChatChunk(GenerationAnswer):
    """One event of a stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[DeltaChoice]
    prompt_token_ids: list[int] | None = optional()


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
            logprobs=self._logprobs(self.asked(chunk)),
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
