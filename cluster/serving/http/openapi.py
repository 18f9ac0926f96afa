"""The parts of `/openapi.json` that FastAPI does not generate: errors, and events of streams."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cluster.serving.protocol.errors import Error

Answers = dict[int | str, dict[str, Any]]

_REF = "#/components/schemas/{model}"
# Some answers of Ray Serve's proxy, which stands before the server in a cluster of several nodes.
PLAIN = {"text/plain": {"schema": {"type": "string"}}}
# Of every route. Clients find the reason in the error's `message`, `param` and `code`.
ERRORS: Answers = {
    "4XX": {
        "model": Error,
        "description": "The request is refused: it does not follow its schema or asks for more than"
        " this model, server or key allows. With status 429 the header `Retry-After` has the"
        " seconds in which there may be room.",
        "content": PLAIN,
    },
    "5XX": {"model": Error, "description": "No engine answers, or it failed.", "content": PLAIN},
}


def streamed(part: type[BaseModel]) -> Answers:
    """A whole answer, or events with a `part` each; described as FastAPI describes events."""
    parts = [{"$ref": _REF.format(model=model.__name__)} for model in (part, Error)]
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": parts},
    }
    event = {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
    }
    return {
        200: {
            "description": "The answer: all at once or, with `stream: true`, as events.",
            "content": {"text/event-stream": {"itemSchema": event}},
        }
    }


def describe_events(app: FastAPI, *parts: type[BaseModel]) -> None:
    """Add the schemas of the `parts` in events to the document."""
    _, defined = models_json_schema([(part, "serialization") for part in parts], ref_template=_REF)
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        document["components"]["schemas"] |= defined["$defs"]
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # how FastAPI says to extend it
