"""OpenAI's `/v1/chat/completions`, as values; see :mod:`cluster.serving.protocol.completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from cluster.serving.protocol.counts import AnswerMetrics, SpecDec, Usage, optional
from cluster.serving.protocol.errors import ApiError
from cluster.serving.protocol.fields import (
    Labels,
    NewTokens,
    No,
    Part,
    Tops,
    needs,
    schema_rules,
)
from cluster.serving.protocol.generation import STREAM_RULE, GenerationRequest
from cluster.serving.protocol.logprobs import ChatLogprobs
from cluster.serving.protocol.messages import ChatMessage, Content
from cluster.serving.protocol.rounds import StreamedRound
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

Empty = Annotated[list[Any], Field(max_length=0)]
FinishReason = Literal["stop", "length", "tool_calls"]

NOT_BOTH = {
    "not": {
        "properties": {
            "add_generation_prompt": {"const": True},
            "continue_final_message": {"const": True},
        },
        "required": ["add_generation_prompt", "continue_final_message"],
    }
}


class Prediction(Part):
    """What the answer may be like. It is a hint, which never changes the answer."""

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
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        default=None,
        description=f"at most {MAX_TOOLS} functions, each with a name and perhaps a description and"
        " parameters; other tools are not supported",
    )

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call."""
        return self.tools or []

    @property
    def plain(self) -> bool:
        """Whether there is nothing but texts: no tools, calls or results of tools."""
        return not self.offered and not any(
            message.role == "tool" or (message.role == "assistant" and message.tool_calls)
            for message in self.messages
        )

    @field_validator("add_generation_prompt")
    @classmethod
    def _not_both(cls, value: bool | None, info: Any) -> bool | None:
        if value and info.data.get("continue_final_message"):
            raise ValueError("cannot be true together with continue_final_message")
        return value


class ChatRequest(Rendered, GenerationRequest, Labels):
    """The body of `POST /v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra=schema_rules(
            STREAM_RULE,
            needs("top_logprobs", [{"type": "integer", "minimum": 1}], "logprobs"),
            NOT_BOTH,
        )
    )

    max_completion_tokens: NewTokens | None = None
    max_tokens: NewTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Tops | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        default=None,
        description='"none", "auto", "required" or'
        ' {"type": "function", "function": {"name": …}}; others are not supported',
    )
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    # Clients send the neutral values of these.
    functions: Empty | None = Field(default=None, description="[]; functions are given as tools")
    function_call: Literal["none", "auto"] | None = Field(
        default=None, description='"none" or "auto"; tool_choice says which tool is called'
    )
    store: No | None = Field(default=None, description="false; nothing is stored here")
    modalities: Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True)] | None = (
        Field(default=None, description='["text"]; others are not supported')
    )
    audio: None = Field(default=None, description="null; audio is not supported")
    web_search_options: None = Field(default=None, description="null; there is no web search")
    reasoning_effort: Literal["none", "medium"] | None = Field(
        default=None,
        description='"none" or "medium"; a template that reads others takes them from'
        " chat_template_kwargs",
    )
    verbosity: Literal["medium"] | None = Field(
        default=None, description='"medium"; others are not supported'
    )

    @field_validator("top_logprobs")
    @classmethod
    def _only_with_logprobs(cls, value: int | None, info: Any) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs: true")
        return value

    @property
    def most_tokens(self) -> int | None:
        """Either's name will do. Raises :class:`ApiError` (400) where they say different things."""
        if self.max_completion_tokens is None or self.max_tokens is None:
            return self.max_completion_tokens or self.max_tokens
        if self.max_tokens != self.max_completion_tokens:
            raise ApiError(
                f"max_tokens: {self.max_tokens} is not max_completion_tokens, which is"
                f" {self.max_completion_tokens}: one of them is enough",
                param="max_tokens",
                code="conflicting_parameters",
            )
        return self.max_tokens

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def grammar(self) -> tuple[str, Grammar] | None:
        """Of a call that has to be, or of the answer's format. Raises :class:`ApiError` (400)."""
        wanted, demanded = super().grammar, self.demanded
        if wanted is not None and self.offered:
            raise ApiError(
                "response_format: does not go together with tools: a call has a format of its own",
                param="response_format",
                code="conflicting_parameters",
            )
        return ("tools", call_grammar(demanded)) if demanded else wanted

    @property
    def demanded(self) -> list[Tool]:
        """The tools of which one has to be called; empty where that is left to the model. Raises
        :class:`ApiError` (400) for a choice of a tool that is not there."""
        if self.tool_choice in (None, "none", "auto"):
            return []
        choice, offered = self.tool_choice, self.offered
        if isinstance(choice, NamedTool):
            offered = [tool for tool in offered if tool.function.name == choice.function.name]
        if not offered:
            raise ApiError(
                "tool_choice: there is no such tool among tools",
                param="tool_choice",
                code="conflicting_parameters",
            )
        return offered

    @property
    def tops(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class Answered(BaseModel):
    """The message that answers."""

    role: Literal["assistant"] = "assistant"
    content: str | None  # null beside tool calls, where there is none
    refusal: None = None
    tool_calls: list[ToolCall] | None = optional()


class ChatChoice(BaseModel):
    index: int
    message: Answered
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    token_ids: list[int] | None = optional()


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str  # the configuration's id
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = optional()
    specdec: SpecDec | None = optional()
    metrics: AnswerMetrics | None = optional()


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


class ChatChunk(BaseModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[DeltaChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = optional()
    specdec: SpecDec | None = optional()
    metrics: AnswerMetrics | None = optional()
    round: StreamedRound | None = optional()
