"""The templates of pages and SVG files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def render(name: str, filters: dict[str, Callable[..., Any]] | None = None, **values: Any) -> str:
    """The template `name`, filled in; texts are escaped. Raises for a value that is missing."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters or {}
    return environment.get_template(name).render(**values)
