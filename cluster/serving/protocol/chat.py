"""OpenAI's `/v1/chat/completions`; see :mod:`cluster.serving.protocol.completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from cluster.serving.protocol.counts import optional
from cluster.serving.protocol.errors import conflict
from cluster.serving.protocol.fields import Empty, Labels, NewTokens, No, Part, Tops, neutral
from cluster.serving.protocol.generation import GenerationAnswer, GenerationRequest
from cluster.serving.protocol.logprobs import ChatLogprobs
from cluster.serving.protocol.messages import ChatMessage, Content
from cluster.serving.protocol.tools import (
    MAX_TOOLS,
    NamedTool,
    Tool,
    ToolCall,
    ToolCallDelta,
    call_grammar,
)
from specdec_core.tokens.grammar import Grammar

MAX_MESSAGES = 1024

FinishReason = Literal["stop", "length", "tool_calls"]


class Prediction(Part):
    """A hint at the answer, which never changes it."""

    type: Literal["content"]
    content: Content


class Rendered(Part):
    """How messages become a prompt."""

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = neutral(
        f"at most {MAX_TOOLS} functions, each with a name and perhaps a description and"
        " parameters; other tools are not supported"
    )

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call."""
        return self.tools or []

    @property
    def text_only(self) -> bool:
        """Whether the chat has no tools, no calls and no results of calls."""
        return not self.offered and not any(
            message.role == "tool" or (message.role == "assistant" and message.tool_calls)
            for message in self.messages
        )

    @model_validator(mode="after")
    def _check_generation_prompt(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            reason = "cannot be true together with continue_final_message"
            raise conflict("add_generation_prompt", reason)
        return self


class ChatRequest(Rendered, GenerationRequest, Labels):
    """The body of `POST /v1/chat/completions`."""

    max_completion_tokens: NewTokens | None = None
    max_tokens: NewTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Tops | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = neutral(
        '"none", "auto", "required" or {"type": "function", "function": {"name": …}}; others are'
        " not supported"
    )
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    # Fields of which clients send the neutral values.
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
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def tops(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def required(self) -> list[Tool]:
        """The tools of which the model must call one; empty where it may answer without a call."""
        if isinstance(choice := self.tool_choice, NamedTool):
            return [tool for tool in self.offered if tool.function.name == choice.function.name]
        return self.offered if choice == "required" else []

    @property
    def grammar(self) -> tuple[str, Grammar] | None:
        """The grammar of a required call, or of the answer's format."""
        return ("tools", call_grammar(self.required)) if self.required else super().grammar


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
