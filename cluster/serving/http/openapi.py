"""The parts of `/openapi.json` that FastAPI does not generate: the bodies of requests, which their
routes read themselves, and the answers that no route gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cluster.serving.protocol.chat import ChatChunk, ChatRequest
from cluster.serving.protocol.completions import CompletionRequest
from cluster.serving.protocol.errors import Error
from cluster.serving.protocol.fields import MAX_BODY_BYTES
from cluster.serving.protocol.responses import ResponseEvent, ResponseRequest
from cluster.serving.protocol.tokens import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest

Answers = dict[int | str, dict[str, Any]]

BODIES: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatRequest,
    ResponseRequest,
    TokenizeRequest,
    TokenizeChatRequest,
    DetokenizeRequest,
)
_REF = "#/components/schemas/{model}"
_KEY = "key"  # the security scheme


def refer(name: str) -> dict[str, str]:
    """A reference to the schema of this name."""
    return {"$ref": _REF.format(model=name)}


def body_of(*models: type[BaseModel]) -> dict[str, Any]:
    """Of an operation: its body is one of these."""
    schemas = [refer(model.__name__) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


# Of answers that Ray Serve's proxy gives, where there is one: in a cluster of several nodes.
PLAIN = {"text/plain": {"schema": {"type": "string"}}}

# Answers at every route.
ANYWHERE: Answers = {
    403: {"model": Error, "description": "A page of another site asks, by somebody's browser."},
    405: {"model": Error, "description": "The path does not have this method."},
    408: {
        "model": Error,
        "description": "The answer took longer than a request may take, or, behind Ray Serve's"
        " proxy, than the header `x-request-timeout-seconds` grants.",
        "content": PLAIN,
    },
    500: {"model": Error, "description": "The server failed to answer.", "content": PLAIN},
    503: {"model": Error, "description": "No server is ready, or it stops.", "content": PLAIN},
}

MODEL: Answers = {404: {"model": Error, "description": "The model is not served here."}}
MODEL_NAME = {
    "parameters": [{"name": "name", "in": "path", "required": True, "schema": refer("ModelName")}]
}

NEEDS_BODY: Answers = MODEL | {
    400: {
        "model": Error,
        "description": "The body does not follow its schema; or values of it do not go together, or"
        " are more than this model or this server takes (its `code` says which).",
    },
    413: {"model": Error, "description": f"The body is larger than {MAX_BODY_BYTES} bytes."},
    429: {
        "model": Error,
        "description": "Too many requests are waiting already, or the key has used what it may use"
        " in a minute (code `rate_limit_exceeded`).",
        "headers": {
            "Retry-After": {
                "description": "Seconds in which there may be room.",
                "schema": {"type": "integer", "minimum": 1},
            }
        },
    },
}


def _streamed(part: str) -> Answers:
    """A whole answer, or events with its parts; described as FastAPI describes events."""
    content = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [refer(part), refer("Error")]},
    }
    event = {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, content]}},
    }
    return {
        200: {
            "description": "The answer: all at once or, with `stream: true`, as events.",
            "content": {"text/event-stream": {"itemSchema": event}},
        }
    }


COMPLETION: Answers = NEEDS_BODY | _streamed("Completion")
CHAT: Answers = NEEDS_BODY | _streamed("ChatChunk")
RESPONSE: Answers = NEEDS_BODY | _streamed("ResponseEvent")


def describe_bodies(
    app: FastAPI, served: Mapping[str, Mapping[str, Any]], open_routes: frozenset[str], keys: bool
) -> None:
    """Add the schemas of requests' bodies and their parts to the document; by name, what `served`
    adds to them. With `keys` all routes but `open_routes` need one."""
    inputs = [(model, "validation") for model in BODIES]
    _, defined = models_json_schema(
        [*inputs, (ChatChunk, "serialization"), (ResponseEvent, "serialization")],  # type: ignore[list-item]  # they are literals
        ref_template=_REF,
    )
    schemas = {
        name: {**schema, **served.get(name, {})} for name, schema in defined["$defs"].items()
    }
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        components = document["components"]
        components["schemas"] = schemas | components["schemas"]
        if keys:
            components["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
            for path, operations in document["paths"].items():
                if path not in open_routes:
                    _need_key(operations)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # how FastAPI says to extend it


def _need_key(operations: dict[str, Any]) -> None:
    error = {"application/json": {"schema": refer("Error")}}
    for operation in operations.values():
        operation["security"] = [{_KEY: []}]
        operation["responses"]["401"] = {
            "description": "The API key is missing, or not known here.",
            "content": error,
        }
