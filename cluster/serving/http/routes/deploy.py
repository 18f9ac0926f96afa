"""Replacing what is served and stopping the server, with the server's token."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request as HttpRequest

from cluster.serving.engine_loop import EngineFailed
from cluster.serving.http.access import OPERATE
from cluster.serving.http.answer import while_connected
from cluster.serving.http.bodies import read_body
from cluster.serving.http.service import FleetService
from cluster.serving.protocol.errors import ApiError
from cluster.serving.served import Deployment
from specdec_core.base.errors import UserError
from specdec_core.config import parse_json

TOKEN_HEADER = "x-specdec-token"
DEPLOY, ROLL_BACK, STOP = OPERATE


def router(service: FleetService[Any]) -> APIRouter:
    """`/v1/specdec/deploy`, `/v1/specdec/rollback` and `/v1/specdec/stop`; none for a server
    without a token."""
    fleet = service.fleet
    if not fleet.operation.token:
        return APIRouter()
    token = fleet.operation.token.encode()

    def check(request: HttpRequest) -> None:
        given = request.headers.get(TOKEN_HEADER, "").encode()
        if not hmac.compare_digest(given, token):
            raise ApiError(f"{TOKEN_HEADER}: not this server's token", status=403)

    routes = APIRouter(include_in_schema=False, dependencies=[Depends(check)])

    # A client that leaves meanwhile has changed nothing.
    @routes.post(DEPLOY, response_model=Deployment)
    async def deploy(request: HttpRequest, canary: float | None = None) -> Any:
        with _refusing():
            wanted = parse_json(Deployment, await read_body(request), "the body")
            wanted = await asyncio.to_thread(wanted.received)
            if canary is not None:
                return await while_connected(request, fleet.try_out(wanted, canary))
            return await while_connected(request, fleet.deploy(wanted))

    @routes.post(ROLL_BACK, response_model=Deployment)
    async def roll_back(request: HttpRequest) -> Any:
        with _refusing():
            await read_body(request)  # else its end would be taken for the client's leaving
            return await while_connected(request, fleet.roll_back())

    @routes.post(STOP, status_code=204)
    async def stop(drain: float = 0.0) -> None:
        await service.stopping.within(drain)

    return routes


@contextmanager
def _refusing() -> Iterator[None]:
    """Answer 400 for what is refused, and 503 where it may succeed later."""
    try:
        yield
    except UserError as error:
        raise ApiError(str(error)) from None
    except EngineFailed as error:
        raise ApiError(str(error), status=503, type="server_error") from None
