"""Whether the server is there, and whether it answers."""

from __future__ import annotations

from fastapi import APIRouter, Response

from cluster.serving.http.openapi import PLAIN
from cluster.serving.http.service import Service
from cluster.serving.protocol.models import Health, Ready


def router(service: Service) -> APIRouter:
    """`/health` and `/ready`."""
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
