"""Why a model has no compiled graph."""

from __future__ import annotations


class CannotCompile(Exception):
    """Why there is no graph, in one line."""


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return next((line for line in str(error).splitlines() if line.strip()), "no reason given")
