"""Pages for people: static files that ask the other routes for all that they show."""

from __future__ import annotations

from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

# Nothing from elsewhere is loaded, asked or shown, and no other site shows the page.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Page(NamedTuple):
    """`index.html` and what it needs, by where they are: a folder of a Python package."""

    package: str
    folder: str


class _Files(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response


class Heads:
    """ASGI middleware: HEAD is answered as GET is, and the server leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)


def add_page(app: FastAPI, page: Page) -> None:
    """Show the page at `/`; its other files are below its folder's name."""
    files = _Files(packages=[page])

    @app.get("/", include_in_schema=False)
    async def index(request: HttpRequest) -> Response:
        return await files.get_response("index.html", request.scope)

    app.mount(f"/{page.folder}", files)
