"""The values that the fields of requests may have, and fields that need not be there."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_STOP_STRINGS = 4
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_CHOICES = 32  # for each prompt


def neutral(expected: str) -> Any:
    """An optional field. Clients send its neutral value; an error says what was `expected`."""
    return Field(default=None, description=expected)


def optional() -> Any:
    """A field that is left out where it is None."""
    return Field(default=None, exclude_if=lambda value: value is None)


def _only(wanted: bool) -> AfterValidator:
    """Accepts one of the two values. A `Literal` would accept 0 for False, too."""

    def check(value: bool) -> bool:
        if value is not wanted:
            raise ValueError("not supported")
        return value

    return AfterValidator(check)


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 1.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


No = Annotated[bool, _only(False), Field(json_schema_extra={"const": False})]
Yes = Annotated[bool, _only(True), Field(json_schema_extra={"const": True})]
WHOLE = BeforeValidator(_whole)
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0), WHOLE]
One = Annotated[int, Field(ge=1, le=1), WHOLE]
NewTokens = Annotated[int, Field(ge=1), WHOLE]
TokenId = Annotated[int, WHOLE]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
Tops = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE]
Empty = Annotated[list[Any], Field(max_length=0)]
Bias = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")],
        Annotated[float, Field(ge=-100, le=100)],
    ],
    Field(max_length=1024, fail_fast=True, json_schema_extra={"additionalProperties": False}),
]


class Part(BaseModel):
    """A part of a request: strictly typed, without unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_key(cls, value: Any) -> Any:
        """Keeps one unknown key. Each makes an error, and a body has room for a million."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((key for key in value if key not in known), None)
        return {key: inner for key, inner in value.items() if key in known or key == unknown}


class CacheOptions(Part):
    mode: Literal["implicit"] | None = None


class Labels(Part):
    """What OpenAI bills, caches and stores requests by. It does not change an answer here."""

    safety_identifier: str | None = None
    prompt_cache_key: str | None = None  # prompts with a common prefix share the cache anyway
    prompt_cache_options: CacheOptions | None = neutral(
        '{"mode": "implicit"}; others are not supported'
    )
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None  # at most
    service_tier: Literal["auto", "default"] | None = neutral(
        '"auto" or "default"; there is one tier'
    )
    metadata: dict[str, str] | None = Field(
        default=None, max_length=16, fail_fast=True, description="at most 16 strings by name"
    )
    moderation: None = neutral("null; moderation is not supported")
    user: str | None = None


class StreamOptions(Part):
    include_usage: bool | None = False
    include_obfuscation: bool | None = None  # of lengths; it is not done
    continuous_usage_stats: bool | None = False
    include_rounds: bool | None = False


class Speculation(Part):
    """How one request is decoded. Its output, or the output's distribution, does not change."""

    enabled: bool = True
    max_tokens: Count | None = neutral("the most consecutive candidate tokens in a round")

    @property
    def most(self) -> int | None:
        """Candidate tokens in a round, at most. 0: none, None: as the configuration says."""
        return self.max_tokens if self.enabled else 0
