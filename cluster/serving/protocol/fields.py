"""The kinds of values that requests have, named as in `/openapi.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from typing_extensions import TypeAliasType

MAX_BODY_BYTES = 8 * 2**20
MAX_STOP_STRINGS = 4
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_CHOICES = 32  # of a prompt


def _only(wanted: bool) -> AfterValidator:
    """Accepts this one value; a `Literal` would accept 0 for False."""

    def check(value: bool) -> bool:
        if value is not wanted:
            raise ValueError("not supported")
        return value

    return AfterValidator(check)


No = Annotated[bool, _only(False), Field(json_schema_extra={"const": False})]
Yes = Annotated[bool, _only(True), Field(json_schema_extra={"const": True})]


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 1.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0), WHOLE]
One = Annotated[int, Field(ge=1, le=1), WHOLE]
Unit = Annotated[float, Field(ge=1, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Tops = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE]

# Named, so that their schemas can have the limits of the model that is served.
ModelName = TypeAliasType("ModelName", str)
NewTokens = TypeAliasType("NewTokens", Annotated[int, Field(ge=1), WHOLE])
NewTokensOrNone = TypeAliasType("NewTokensOrNone", Count)
LeastTokens = TypeAliasType("LeastTokens", Count)
TokenId = TypeAliasType("TokenId", Annotated[int, WHOLE])
TokenIds = TypeAliasType("TokenIds", Annotated[list[TokenId], Field(min_length=1, fail_fast=True)])
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
        """One unknown key is enough to refuse it: each makes an error, and a body has room for a
        million."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((key for key in value if key not in known), None)
        return {key: inner for key, inner in value.items() if key in known or key == unknown}


class CacheOptions(Part):
    mode: Literal["implicit"] | None = None


class Labels(Part):
    """What OpenAI bills, caches and stores by. Nothing of it changes an answer here."""

    safety_identifier: str | None = None
    prompt_cache_key: str | None = None  # prompts that begin alike share the cache by themselves
    prompt_cache_options: CacheOptions | None = Field(
        default=None, description='{"mode": "implicit"}; others are not supported'
    )
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None  # at most
    service_tier: Literal["auto", "default"] | None = Field(
        default=None, description='"auto" or "default"; there is one tier'
    )
    metadata: dict[str, str] | None = Field(
        default=None, max_length=16, fail_fast=True, description="at most 16 strings by name"
    )
    moderation: None = Field(default=None, description="null; moderation is not supported")


class StreamOptions(Part):
    include_usage: bool | None = False
    include_obfuscation: bool | None = None  # of lengths; there is none
    continuous_usage_stats: bool | None = False
    include_rounds: bool | None = False


class Speculation(Part):
    """How one request is decoded; its text or distribution is the same either way."""

    enabled: bool = True
    max_tokens: Count | None = Field(
        default=None, description="consecutive candidates a round, at most"
    )

    @property
    def most(self) -> int | None:
        """Candidates a round, at most; 0: none, None: as the configuration says."""
        return self.max_tokens if self.enabled else 0


def schema_rules(*rules: dict[str, Any]) -> dict[str, Any]:
    """What a schema says of several keys together."""
    return {"allOf": list(rules)}


def needs(key: str, kinds: Sequence[dict[str, Any]], other: str) -> dict[str, Any]:
    """The rule that `other` is true where `key` is one of these kinds of value."""
    return {
        "if": {"properties": {key: {"anyOf": list(kinds)}}, "required": [key]},
        "then": {"properties": {other: {"const": True}}, "required": [other]},
    }
