"""The FastAPI application of a service.

It needs a :class:`Service` and nothing of Ray, so it runs under any ASGI server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

from cluster.serving.http.access import Gate
from cluster.serving.http.errors import add_error_handlers
from cluster.serving.http.listener import Listener
from cluster.serving.http.openapi import ERRORS, describe_events
from cluster.serving.http.pages import Heads, Page, add_page
from cluster.serving.http.routes import chat, completions, deploy, responses, server
from cluster.serving.http.samples import PromptSampling, Samples
from cluster.serving.http.service import Service
from cluster.serving.http.stopping import Admission

# The header is checked by `Gate`; this one tells the document about it.
KEY = Security(HTTPBearer(scheme_name="key", auto_error=False))


def build_app(
    service: Service,
    page: Page | None = None,
    samples: PromptSampling | None = None,
    listener: Listener | None = None,
) -> FastAPI:
    """The routes of `service`, which runs during the application's lifespan. With `samples`, some
    prompts are kept. With a `listener`, the application also answers at that address."""
    if samples is not None:
        service.samples = Samples(samples)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with (
            service.running(),
            service.samples.writing() if service.samples else nullcontext(),
            listener.serving(app) if listener else nullcontext(),
        ):
            yield
            await service.stopping.within(0 if listener is None else listener.drain)

    app = FastAPI(
        title="specdec",
        lifespan=lifespan,
        responses=ERRORS,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's pages load scripts from other sites
        redoc_url=None,
    )
    add_error_handlers(app)
    if page is not None:
        add_page(app, page)
    app.include_router(server.health_router(service))
    for routes in (server, completions, chat, responses, deploy):
        keys = [KEY] if service.access.keys else []
        app.include_router(routes.router(service), dependencies=keys)
    describe_events(app, chat.ChatChunk, responses.ResponseEvent)
    app.add_middleware(Gate, access=service.access)
    app.add_middleware(Heads)
    app.add_middleware(Admission, stopping=service.stopping)
    return app
