"""OpenAI's `/v1/completions`, as values.

As in the openai client 3.52, with two keys of vLLM's (`top_k`, `ignore_eos`) and one additional
object in the answer: `specdec`, the counts of speculative decoding. Unsupported keys are refused by
name; only `user` is silently ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cluster.serving.protocol.counts import SpecDec, Usage
from cluster.serving.protocol.errors import refusal
from cluster.serving.protocol.fields import (
    WHOLE,
    ModelName,
    NewTokens,
    One,
    StreamOptions,
    Text,
    TokenIds,
    Zero,
)
from specdec_core.config import Sampling, Temperature

MAX_STOP_STRINGS = 4
MAX_PROMPTS = 64

Prompts = Annotated[
    list[Text | TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
]


class CompletionRequest(BaseModel):
    """The body of `POST /v1/completions`. A key left out or null takes the server's default."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={
            "if": {
                "properties": {"stream_options": {"type": "object"}},
                "required": ["stream_options"],
            },
            "then": {"properties": {"stream": {"const": True}}, "required": ["stream"]},
        },
    )

    model: ModelName | None = None
    prompt: Text | TokenIds | Prompts = Field(
        union_mode="left_to_right",
        description=f"a string, token ids, or at most {MAX_PROMPTS} of these, none of them empty",
    )
    max_tokens: NewTokens | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0), WHOLE] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS)] | None = Field(
        default=None,
        description=f"a string, or at most {MAX_STOP_STRINGS} of them, none of them empty",
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    # Clients send the neutral values of these.
    n: One | None = Field(default=None, description="1; more is not supported")
    best_of: One | None = Field(default=None, description="1; more is not supported")
    logprobs: None = Field(default=None, description="null; others are not supported")
    suffix: Literal[""] | None = Field(default=None, description='""; others are not supported')
    frequency_penalty: Zero | None = Field(default=None, description="0; others are not supported")
    presence_penalty: Zero | None = Field(default=None, description="0; others are not supported")
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = Field(
        default=None, description="{}; others are not supported"
    )

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        single = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if single else prompt

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @field_validator("stream_options")
    @classmethod
    def _only_streaming(cls, value: StreamOptions | None, info: Any) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("needs stream: true")
        return value

    @classmethod
    def from_body(cls, body: bytes) -> CompletionRequest:
        """Validate a request body.

        Raises:
            ApiError: 400, with the offending key as `param`.
        """
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise refusal(error, cls) from None

    def sampling(self, default: Sampling) -> Sampling:
        """The configuration's sampling, with what this request asks for."""
        given = {key: getattr(self, key) for key in ("temperature", "top_p", "top_k")}
        return default.model_copy(update={k: v for k, v in given.items() if v is not None})


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: None = None
    finish_reason: Literal["stop", "length"] | None = None


class Completion(BaseModel):
    """An answer, or with a part of the text one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str  # the configuration's id
    choices: list[CompletionChoice]
    usage: Usage | None = None
    specdec: SpecDec | None = None
