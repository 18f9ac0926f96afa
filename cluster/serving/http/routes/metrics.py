"""What the server counts, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Response

from cluster.serving.http.openapi import PLAIN
from cluster.serving.http.service import Service


def router(service: Service) -> APIRouter:
    """`/metrics`."""
    routes = APIRouter()

    @routes.get("/metrics", response_class=Response, responses={200: {"content": PLAIN}})
    async def metrics() -> Response:
        page, content_type = await service.page()
        return Response(page, headers={"content-type": content_type})

    return routes
