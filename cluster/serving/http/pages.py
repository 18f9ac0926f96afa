"""Web pages: static files with scripts that ask the other routes for data."""

from __future__ import annotations

from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

# The page loads nothing from other sites, and no other site shows it.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Page(NamedTuple):
    """The folder of a Python package with `index.html` and the files that it needs."""

    package: str
    folder: str


class _Files(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response


class HeadRequests:
    """ASGI middleware: HEAD is answered like GET, and the server leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)


def add_page(app: FastAPI, page: Page) -> None:
    """Show the page at `/`, with its other files below its folder's name."""
    files = _Files(packages=[page])

    @app.get("/", include_in_schema=False)
    async def index(request: HttpRequest) -> Response:
        return await files.get_response("index.html", request.scope)

    app.mount(f"/{page.folder}", files)
