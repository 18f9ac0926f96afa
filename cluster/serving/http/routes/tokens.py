"""`/tokenize` and `/detokenize`: texts to tokens and back, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Discriminator, Field, Tag

from cluster.serving.http.bodies import JsonRoute, run
from cluster.serving.http.service import Service
from cluster.serving.protocol.counts import optional
from cluster.serving.protocol.fields import Part, TokenId
from cluster.serving.protocol.generation import check_tokens
from cluster.serving.protocol.messages import Rendered


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


def router(service: Service) -> APIRouter:
    """`/tokenize` and `/detokenize`."""
    routes = APIRouter(route_class=JsonRoute)

    def cut(body: TokenizeRequest) -> Tokens:
        most = service.engine.max_length
        if isinstance(body, TokenizeChatRequest):
            tokens = service.prompts.of_chat(body, most)
        else:
            tokens = service.prompts.of_text(body.prompt, most, body.add_special_tokens)
        names = service.prompts.tokenizer.convert_ids_to_tokens(list(tokens))
        return Tokens(
            count=len(tokens),
            max_model_len=most,
            tokens=list(tokens),
            token_strs=names if body.return_token_strs else None,
        )

    def join(body: DetokenizeRequest) -> Detokenized:
        check_tokens(body.tokens, service.engine.vocab_size, "tokens")
        return Detokenized(prompt=service.prompts.tokenizer.decode(body.tokens))

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Tokens:
        service.check_model(body.model)
        return await run(cut, body, quick=False)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Detokenized:
        service.check_model(body.model)
        return await run(join, body, quick=False)

    return routes
