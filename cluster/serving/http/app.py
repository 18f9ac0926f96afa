"""The FastAPI application of a service.

It needs a service and nothing of Ray, so it runs under any ASGI server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

from cluster.serving.http.access import Gate
from cluster.serving.http.errors import add_error_handlers
from cluster.serving.http.listener import Listener
from cluster.serving.http.openapi import ERRORS, describe_events
from cluster.serving.http.pages import HeadRequests, Page, add_page
from cluster.serving.http.routes import deploy, generation, server
from cluster.serving.http.samples import PromptSampling, Samples
from cluster.serving.http.service import FleetService, Service
from cluster.serving.http.stopping import Admission

# The header is checked by `Gate`; this one tells the document about it.
KEY = Security(HTTPBearer(scheme_name="key", auto_error=False))


def build_app(
    service: Service,
    page: Page | None = None,
    samples: PromptSampling | None = None,
    listener: Listener | None = None,
) -> FastAPI:
    """The routes of `service`. With `samples`, some prompts are kept. See :func:`fleet_app`."""
    if samples is not None:
        service.samples = Samples(samples)
    app = fleet_app(service, listener, responses=ERRORS)
    if page is not None:
        add_page(app, page)
    for routes in (server, generation):
        keys = [KEY] if service.access.keys else []
        app.include_router(routes.router(service), dependencies=keys)
    describe_events(app, *generation.PARTS)
    return app


def fleet_app(service: FleetService[Any], listener: Listener | None, **options: Any) -> FastAPI:
    """The application of any fleet, with the routes for its health and its operation. The service
    runs during the application's lifespan. With a `listener`, the application also answers at that
    address. `options` are FastAPI's."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running(), listener.serving(app) if listener else nullcontext():
            yield
            await service.stopping.within(0 if listener is None else listener.drain)

    app = FastAPI(
        title="specdec",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's pages load scripts from other sites
        redoc_url=None,
        **options,
    )
    add_error_handlers(app)
    app.include_router(server.health_router(service))
    app.include_router(deploy.router(service))
    app.add_middleware(Gate, access=service.access)
    app.add_middleware(HeadRequests)
    app.add_middleware(Admission, stopping=service.stopping)
    return app
