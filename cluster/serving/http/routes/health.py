"""Whether requests are answered."""

from __future__ import annotations

from fastapi import APIRouter, Response

from cluster.serving.http.openapi import PLAIN
from cluster.serving.http.service import CompletionService
from cluster.serving.protocol.models import Health


def router(service: CompletionService) -> APIRouter:
    """`/health`."""
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

    return routes
