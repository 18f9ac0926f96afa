"""OpenAI's `/v1/chat/completions`, as values; see :mod:`cluster.serving.protocol.completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from cluster.serving.protocol.counts import Metrics, SpecDec, Usage, optional
from cluster.serving.protocol.errors import ApiError
from cluster.serving.protocol.fields import NewTokens, No, Part, Tops, needs, schema_rules
from cluster.serving.protocol.generation import STREAM_RULE, GenerationRequest
from cluster.serving.protocol.logprobs import ChatLogprobs
from cluster.serving.protocol.rounds import StreamedRound
from specdec_core.prompts.prompt import Message

MAX_MESSAGES = 1024

Empty = Annotated[list[Any], Field(max_length=0)]

NOT_BOTH = {
    "not": {
        "properties": {
            "add_generation_prompt": {"const": True},
            "continue_final_message": {"const": True},
        },
        "required": ["add_generation_prompt", "continue_final_message"],
    }
}
_ROLES = {"developer": "system"}  # OpenAI's newer name


class TextPart(Part):
    type: Literal["text"]
    text: str


class ChatMessage(Part):
    """A message of a request."""

    role: Literal["system", "developer", "user", "assistant"]
    name: str | None = None
    content: str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]
    # Clients send back what they were answered, which has these.
    refusal: None = None
    annotations: Empty | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Empty | None = None

    @property
    def message(self) -> Message:
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return Message(_ROLES.get(self.role, self.role), text, self.name)


class Rendered(Part):
    """How messages become a prompt."""

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("add_generation_prompt")
    @classmethod
    def _not_both(cls, value: bool | None, info: Any) -> bool | None:
        if value and info.data.get("continue_final_message"):
            raise ValueError("cannot be true together with continue_final_message")
        return value


class ChatRequest(Rendered, GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra=schema_rules(
            STREAM_RULE, needs("top_logprobs", [{"type": "integer"}], "logprobs"), NOT_BOTH
        )
    )

    max_completion_tokens: NewTokens | None = None
    max_tokens: NewTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Tops | None = None
    tools: Empty | None = Field(default=None, description="[]; tools are not supported")
    tool_choice: Literal["none"] | None = Field(
        default=None, description='"none"; tools are not supported'
    )
    parallel_tool_calls: bool | None = None  # of no tools
    store: No | None = Field(default=None, description="false; true is not supported")
    service_tier: Literal["auto", "default"] | None = Field(
        default=None, description='"auto" or "default"; others are not supported'
    )
    metadata: dict[str, str] | None = Field(
        default=None,
        max_length=0,
        fail_fast=True,
        description="{}; others are not supported",
    )

    @field_validator("top_logprobs")
    @classmethod
    def _only_with_logprobs(cls, value: int | None, info: Any) -> int | None:
        if value is not None and not info.data.get("logprobs"):
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
    def tops(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class Answered(BaseModel):
    """The message that answers."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: Answered
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"]
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
    metrics: Metrics | None = optional()


class Delta(BaseModel):
    role: Literal["assistant"] | None = optional()
    content: str | None = optional()


class DeltaChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
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
    metrics: Metrics | None = optional()
    round: StreamedRound | None = optional()
