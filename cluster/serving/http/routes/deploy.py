"""What is served can be replaced, and the server stopped, by those who have its token."""

from __future__ import annotations

import asyncio
import hmac

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest

from cluster.serving.engine_loop import EngineFailed
from cluster.serving.http.access import OPERATE
from cluster.serving.http.bodies import read_body
from cluster.serving.http.service import Service
from cluster.serving.protocol.errors import ApiError
from cluster.serving.served import Deployment
from specdec_core.base.errors import UserError
from specdec_core.config import parse_json

TOKEN_HEADER = "x-specdec-token"
DEPLOY, ROLL_BACK, STOP = OPERATE


def router(service: Service) -> APIRouter:
    """`/v1/specdec/deploy`, `/v1/specdec/rollback` and `/v1/specdec/stop`; none for a server
    without a token. They answer without the weights' digests, which clients of earlier versions do
    not know."""
    routes = APIRouter(include_in_schema=False)
    if not service.operation.token:
        return routes
    token = service.operation.token.encode()

    def check(request: HttpRequest) -> None:
        given = request.headers.get(TOKEN_HEADER, "").encode()
        if not hmac.compare_digest(given, token):
            raise ApiError(f"{TOKEN_HEADER}: not this server's token", status=403)

    @routes.post(DEPLOY, response_model_exclude={"weights"})
    async def deploy(request: HttpRequest) -> Deployment:
        check(request)
        canary = _number(request, "canary", "a share of the traffic, as 0.1")
        try:
            wanted = parse_json(Deployment, await read_body(request), "the body")
            # A client may be elsewhere, and one of an earlier version knows of no weights.
            wanted = await asyncio.to_thread(wanted.as_here)
            return await service.deploy(wanted, canary)
        except (UserError, EngineFailed) as error:
            raise _refused(error) from None

    @routes.post(ROLL_BACK, response_model_exclude={"weights"})
    async def roll_back(request: HttpRequest) -> Deployment:
        check(request)
        try:
            return await service.roll_back()
        except (UserError, EngineFailed) as error:
            raise _refused(error) from None

    @routes.post(STOP, status_code=204)
    async def stop(request: HttpRequest) -> None:
        check(request)
        await service.stopping.within(_number(request, "drain", "seconds") or 0.0)

    return routes


def _refused(error: UserError | EngineFailed) -> ApiError:
    """Later it may be possible where only no engine answers."""
    if isinstance(error, EngineFailed):
        return ApiError(str(error), status=503, type="server_error")
    return ApiError(str(error))


def _number(request: HttpRequest, name: str, expected: str) -> float | None:
    """A number of the query. It is read here, behind the check of the token. Raises
    :class:`ApiError`."""
    given = request.query_params.get(name)
    try:
        return None if given is None else float(given)
    except ValueError:
        raise ApiError(f"{name}: expected {expected} (got {given!r:.50})", param=name) from None
