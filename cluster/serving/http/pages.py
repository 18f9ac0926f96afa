"""Pages for people: static files that ask the other routes for all that they show."""

from __future__ import annotations

from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

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


def add_page(app: FastAPI, page: Page) -> None:
    """Show the page at `/`; its other files are below its folder's name."""
    files = _Files(packages=[page])

    @app.get("/", include_in_schema=False)
    async def index(request: HttpRequest) -> Response:
        return await files.get_response("index.html", request.scope)

    app.mount(f"/{page.folder}", files)
