"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from cluster.serving.protocol.chat import NOT_BOTH, Rendered
from cluster.serving.protocol.counts import optional
from cluster.serving.protocol.fields import ModelName, Part, TokenId, schema_rules


class TokenizeRequest(Part):
    """A text to cut into tokens."""

    model: ModelName | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(Rendered):
    """Messages to render and cut into tokens."""

    model_config = ConfigDict(json_schema_extra=schema_rules(NOT_BOTH))

    model: ModelName | None = None
    return_token_strs: bool | None = None


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = optional()


class DetokenizeRequest(Part):
    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class Detokenized(BaseModel):
    prompt: str
