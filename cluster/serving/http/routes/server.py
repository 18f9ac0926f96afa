"""The server: whether it answers, the model that it serves, its version and its metrics."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from cluster.serving.http.openapi import PLAIN
from cluster.serving.http.service import FleetService, Service
from cluster.serving.protocol.models import Health, ModelCard, ModelList, Ready, Version
from specdec_core.models.location import hub_id


def health_router(service: FleetService[Any]) -> APIRouter:
    """`/health` and `/ready`, which need no key."""
    routes = APIRouter()

    @routes.get(
        "/health",
        responses={503: {"model": Health, "description": "The engine failed.", "content": PLAIN}},
        response_model_exclude_unset=True,
    )
    async def health(response: Response) -> Health:
        health = await service.health()
        response.status_code = 200 if health.ready else 503
        return health

    @routes.get(
        "/ready",
        responses={503: {"model": Ready, "description": "Requests are refused.", "content": PLAIN}},
    )
    async def ready(response: Response) -> Ready:
        answers = service.stopping.until is None and service.fleet.accepting
        response.status_code = 200 if answers else 503
        return Ready(ready=answers)

    return routes


def router(service: Service) -> APIRouter:
    """`/v1/models`, `/version` and `/metrics`."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> ModelList:
        card = ModelCard(
            id=service.model,
            created=service.started,
            root=hub_id(service.engine.pair.spec.target) or service.model,
            max_model_len=service.engine.max_length,
        )
        return ModelList(data=[card])

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelCard:
        service.check_model(name)
        (card,) = (await models()).data
        return card

    @routes.get("/version")
    async def versions() -> Version:
        return Version(version=version("specdec"))

    @routes.get("/metrics", response_class=Response, responses={200: {"content": PLAIN}})
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return routes
