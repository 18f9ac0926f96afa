"""Errors of any route, in OpenAI's shape."""

from __future__ import annotations

import logging

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from cluster.serving.protocol.errors import SERVER_ERROR, ApiError

logger = logging.getLogger(__name__)


def answer(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body.model_dump(), error.status, error.headers)


def add_error_handlers(app: FastAPI) -> None:
    """Answer what routes raise. What nobody foresaw is logged, and told without its reason."""

    @app.exception_handler(ApiError)
    async def refuse(_: HttpRequest, error: ApiError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: HttpRequest, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return answer(ApiError(message, status=error.status_code, headers=error.headers))

    @app.exception_handler(Exception)
    async def fail(_: HttpRequest, error: Exception) -> JSONResponse:
        logger.error("a request failed", exc_info=error)
        return answer(SERVER_ERROR)
