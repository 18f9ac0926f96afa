"""The routes that generate text."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from cluster.serving.http.answer import respond
from cluster.serving.http.bodies import JsonRequest, JsonRoute
from cluster.serving.http.openapi import streamed
from cluster.serving.http.routes.chat import ChatAnswer, ChatChunk, ChatCompletion, ChatRequest
from cluster.serving.http.routes.completions import Completion, CompletionAnswer, CompletionRequest
from cluster.serving.http.routes.responses import (
    Response,
    ResponseAnswer,
    ResponseEvent,
    ResponseRequest,
)
from cluster.serving.http.service import Service

PARTS = (ChatChunk, ResponseEvent)  # of streams; no route answers with one alone


def router(service: Service) -> APIRouter:
    """`/v1/completions`, `/v1/chat/completions` and `/v1/responses`."""
    routes = APIRouter(route_class=JsonRoute)

    @routes.post("/v1/completions", response_model=Completion, responses=streamed(Completion))
    async def completions(body: CompletionRequest, request: JsonRequest) -> Any:
        return await respond(service, request, body, CompletionAnswer)

    @routes.post(
        "/v1/chat/completions", response_model=ChatCompletion, responses=streamed(ChatChunk)
    )
    async def chat(body: ChatRequest, request: JsonRequest) -> Any:
        return await respond(service, request, body, ChatAnswer)

    @routes.post("/v1/responses", response_model=Response, responses=streamed(ResponseEvent))
    async def responses(body: ResponseRequest, request: JsonRequest) -> Any:
        return await respond(service, request, body, ResponseAnswer)

    return routes
