"""The FastAPI application of a service.

It needs a :class:`Service` and nothing of Ray, so it runs under any ASGI server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext

from fastapi import APIRouter, FastAPI

from cluster.serving.http.access import OPEN, Gate
from cluster.serving.http.errors import add_error_handlers
from cluster.serving.http.listener import Listener
from cluster.serving.http.openapi import ANYWHERE, describe_bodies
from cluster.serving.http.pages import Heads, Page, add_page
from cluster.serving.http.routes import (
    chat,
    completions,
    deploy,
    health,
    metrics,
    models,
    responses,
    tokens,
)
from cluster.serving.http.samples import PromptSampling, Sampler, Samples
from cluster.serving.http.service import Service
from cluster.serving.http.stopping import Admission

ROUTES: tuple[Callable[[Service], APIRouter], ...] = (
    health.router,
    metrics.router,
    models.router,
    completions.router,
    chat.router,
    responses.router,
    tokens.router,
    deploy.router,
)


def build_app(
    service: Service,
    page: Page | None = None,
    samples: PromptSampling | None = None,
    listener: Listener | None = None,
) -> FastAPI:
    """Routes and error shapes, for those who have access; the application's lifespan is
    the service's. With `samples`, some prompts are kept. With a `listener` it is reached there,
    too."""
    kept = None if samples is None else Samples(samples, service.engine.pair.tokenizer)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with (
            service.running(),
            kept.writing() if kept else nullcontext(),
            listener.serving(app) if listener else nullcontext(),
        ):
            yield
            await service.stopping.within(0 if listener is None else listener.drain)

    app = FastAPI(
        title="specdec",
        lifespan=lifespan,
        responses=ANYWHERE,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere, which then could ask here
        redoc_url=None,
    )
    add_error_handlers(app)
    if page is not None:
        add_page(app, page)
    for router in ROUTES:
        app.include_router(router(service))
    describe_bodies(app, service.schema_limits(), OPEN, keys=service.access.keys is not None)
    if kept is not None:
        app.add_middleware(Sampler, samples=kept)
    app.add_middleware(Gate, access=service.access)
    app.add_middleware(Heads)
    app.add_middleware(Admission, stopping=service.stopping)
    return app
