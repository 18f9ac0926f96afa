"""The parts of `/openapi.json` that FastAPI does not generate: the body of a completion request,
which its route reads itself, and the answers that no route gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from cluster.serving.protocol.completions import CompletionRequest
from cluster.serving.protocol.errors import Error
from cluster.serving.protocol.fields import MAX_BODY_BYTES

Answers = dict[int | str, dict[str, Any]]

_REF = "#/components/schemas/{model}"


def refer(name: str) -> dict[str, str]:
    """A reference to the schema of this name."""
    return {"$ref": _REF.format(model=name)}


# Of answers that Ray Serve gives.
PLAIN = {"text/plain": {"schema": {"type": "string"}}}

# Answers at every route.
ANYWHERE: Answers = {
    405: {"model": Error, "description": "The path does not have this method."},
    408: {
        "description": "More time has passed than the header `x-request-timeout-seconds` grants.",
        "content": PLAIN,
    },
    500: {"model": Error, "description": "The server failed to answer.", "content": PLAIN},
    503: {"description": "No server is ready.", "content": PLAIN},
}

MODEL: Answers = {404: {"model": Error, "description": "The model is not served here."}}
MODEL_NAME = {
    "parameters": [{"name": "name", "in": "path", "required": True, "schema": refer("ModelName")}]
}

# Described as FastAPI describes events.
_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {
        "data": {
            "anyOf": [
                {"const": "[DONE]"},
                {
                    "type": "string",
                    "contentMediaType": "application/json",
                    "contentSchema": {"anyOf": [refer("Completion"), refer("Error")]},
                },
            ]
        }
    },
}

COMPLETION: Answers = MODEL | {
    200: {
        "description": "The completions: all at once or, with `stream: true`, as events.",
        "content": {"text/event-stream": {"itemSchema": _EVENT}},
    },
    400: {
        "model": Error,
        "description": "The body does not follow its schema, or a prompt with its new tokens does"
        " not fit in the model's context (code `context_length_exceeded`).",
    },
    413: {"model": Error, "description": f"The body is larger than {MAX_BODY_BYTES} bytes."},
    429: {
        "model": Error,
        "description": "Too many requests are waiting already (code `rate_limit_exceeded`).",
        "headers": {
            "Retry-After": {
                "description": "Seconds in which there may be room.",
                "schema": {"type": "integer", "minimum": 1},
            }
        },
    },
}
COMPLETION_REQUEST = {
    "requestBody": {
        "content": {"application/json": {"schema": refer("CompletionRequest")}},
        "required": True,
    }
}


def describe_request(app: FastAPI, served: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the schemas of a completion request and its parts to the document; by name, what
    `served` adds to them."""
    body = CompletionRequest.model_json_schema(ref_template=_REF)
    schemas = {**body.pop("$defs"), "CompletionRequest": body}
    schemas = {name: {**schema, **served.get(name, {})} for name, schema in schemas.items()}
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        document["components"]["schemas"] |= schemas
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # how FastAPI says to extend it
