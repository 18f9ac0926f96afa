"""The model that is served."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest

from cluster.serving.http.openapi import MODEL, MODEL_NAME
from cluster.serving.http.service import Service
from cluster.serving.protocol.models import ModelCard, ModelList
from specdec_core.models.location import hub_id


def router(service: Service) -> APIRouter:
    """`/v1/models`."""
    routes = APIRouter()

    def card() -> ModelCard:
        root = hub_id(service.engine.pair.spec.target) or service.model
        return ModelCard.of(service.model, root, service.started, service.engine.max_length)

    @routes.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[card()])

    @routes.get("/v1/models/{name:path}", responses=MODEL, openapi_extra=MODEL_NAME)
    async def model(request: HttpRequest) -> ModelCard:
        service.check_model(request.path_params["name"])
        return card()

    return routes
