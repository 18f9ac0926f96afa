"""Texts to tokens and back, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic_core import from_json
from starlette.requests import Request as HttpRequest

from cluster.serving.http.bodies import read_body, soon
from cluster.serving.http.openapi import NEEDS_BODY, body_of
from cluster.serving.http.service import Service
from cluster.serving.protocol.generation import check_tokens, parse_body
from cluster.serving.protocol.tokens import (
    Detokenized,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
    Tokens,
)


def router(service: Service) -> APIRouter:
    """`/tokenize` and `/detokenize`."""
    routes = APIRouter()

    def cut(content: bytes) -> Tokens:
        body = _tokenize_request(content)
        service.check_model(body.model)
        most = service.engine.max_length
        if isinstance(body, TokenizeChatRequest):
            tokens = service.prompts.of_chat(body, most)
        else:
            tokens = service.prompts.of_text(body.prompt, most, body.add_special_tokens)
        names = service.prompts.tokenizer.convert_ids_to_tokens(list(tokens))
        return Tokens(
            count=len(tokens),
            max_model_len=service.engine.max_length,
            tokens=list(tokens),
            token_strs=names if body.return_token_strs else None,
        )

    def join(content: bytes) -> Detokenized:
        body = parse_body(DetokenizeRequest, content)
        service.check_model(body.model)
        check_tokens(body.tokens, service.engine.vocab_size, "tokens")
        return Detokenized(prompt=service.prompts.tokenizer.decode(body.tokens))

    @routes.post(
        "/tokenize",
        response_model=Tokens,
        responses=NEEDS_BODY,
        openapi_extra=body_of(TokenizeRequest, TokenizeChatRequest),
    )
    async def tokenize(request: HttpRequest) -> Any:
        return await soon(False, cut, await read_body(request))

    @routes.post(
        "/detokenize",
        response_model=Detokenized,
        responses=NEEDS_BODY,
        openapi_extra=body_of(DetokenizeRequest),
    )
    async def detokenize(request: HttpRequest) -> Any:
        return await soon(False, join, await read_body(request))

    return routes


def _tokenize_request(content: bytes) -> TokenizeRequest | TokenizeChatRequest:
    """Of messages where the body has them, else of a prompt."""
    try:
        body = from_json(content)
    except ValueError:
        body = None  # the error is told below
    if isinstance(body, dict) and "messages" in body:
        return parse_body(TokenizeChatRequest, content)
    return parse_body(TokenizeRequest, content)
