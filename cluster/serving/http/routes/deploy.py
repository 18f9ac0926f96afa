"""What is served can be replaced, by those who have the server's token."""

from __future__ import annotations

import hmac

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest

from cluster.serving.http.access import OPERATE
from cluster.serving.http.bodies import read_body
from cluster.serving.http.service import Service
from cluster.serving.protocol.errors import ApiError
from cluster.serving.served import Deployment
from specdec_core.base.errors import UserError
from specdec_core.config import parse_json

TOKEN_HEADER = "x-specdec-token"
DEPLOY, ROLL_BACK = OPERATE


def router(service: Service) -> APIRouter:
    """`/v1/specdec/deploy` and `/v1/specdec/rollback`; none for a server without a token."""
    routes = APIRouter(include_in_schema=False)
    if not service.operation.token:
        return routes
    token = service.operation.token.encode()

    def check(request: HttpRequest) -> None:
        given = request.headers.get(TOKEN_HEADER, "").encode()
        if not hmac.compare_digest(given, token):
            raise ApiError(f"{TOKEN_HEADER}: not this server's token", status=403)

    @routes.post(DEPLOY)
    async def deploy(request: HttpRequest, canary: float | None = None) -> Deployment:
        check(request)
        try:
            wanted = parse_json(Deployment, await read_body(request), "the body")
            return await service.deploy(wanted, canary)
        except UserError as error:
            raise ApiError(str(error)) from None

    @routes.post(ROLL_BACK)
    async def roll_back(request: HttpRequest) -> Deployment:
        check(request)
        try:
            return await service.roll_back()
        except UserError as error:
            raise ApiError(str(error)) from None

    return routes
