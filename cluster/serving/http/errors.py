"""Errors of any route, in OpenAI's shape."""

from __future__ import annotations

import logging

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from cluster.serving.protocol.errors import SERVER_ERROR, ApiError

logger = logging.getLogger(__name__)


def answer(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body.model_dump(), error.status, error.headers)


def add_error_handlers(app: FastAPI) -> None:
    """Answer the errors of routes. An unexpected error is logged; its reason is not sent."""

    @app.exception_handler(ApiError)
    async def refuse(_: HttpRequest, error: ApiError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: HttpRequest, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return answer(ApiError(message, status=error.status_code, headers=error.headers))

    @app.exception_handler(RequestValidationError)
    async def refuse_query(_: HttpRequest, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return answer(ApiError(f"{name}: {first['msg']} (got {first['input']!r:.50})", param=name))

    @app.exception_handler(ClientDisconnect)
    async def left(_: HttpRequest, __: ClientDisconnect) -> Response:
        return Response(status_code=499)  # which nobody reads

    @app.exception_handler(Exception)
    async def fail(_: HttpRequest, error: Exception) -> JSONResponse:
        logger.error("a request failed", exc_info=error)
        return answer(SERVER_ERROR)
