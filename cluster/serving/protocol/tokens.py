"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Discriminator, Field, Tag

from cluster.serving.protocol.chat import Rendered
from cluster.serving.protocol.counts import optional
from cluster.serving.protocol.fields import Part, TokenId


class TokenizeTextRequest(Part):
    """A text to cut into tokens."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(Rendered):
    """Messages to render and cut into tokens."""

    model: str | None = None
    return_token_strs: bool | None = None


def _kind(body: Any) -> str:
    chat = isinstance(body, TokenizeChatRequest) or (isinstance(body, dict) and "messages" in body)
    return "a chat" if chat else "a text"


TokenizeRequest = Annotated[
    Annotated[TokenizeTextRequest, Tag("a text")] | Annotated[TokenizeChatRequest, Tag("a chat")],
    Discriminator(_kind),
]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = optional()


class DetokenizeRequest(Part):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class Detokenized(BaseModel):
    prompt: str
