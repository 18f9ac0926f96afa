"""OpenAI's error object, and what is refused with it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails as Found
from pydantic_core import from_json

ErrorType = Literal[
    "invalid_request_error", "authentication_error", "rate_limit_error", "server_error"
]


class ErrorDetails(BaseModel):
    message: str
    type: ErrorType
    param: str | None
    code: str | None


class Error(BaseModel):
    """OpenAI's error object."""

    error: ErrorDetails


class ApiError(Exception):
    """A refused request; becomes an :class:`Error`."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        type: ErrorType = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = Error(error=ErrorDetails(message=message, type=type, param=param, code=code))


SERVER_ERROR = ApiError("the server failed to answer", status=500, type="server_error")


def refusal(error: ValidationError, model: type[BaseModel], body: bytes) -> ApiError:
    """The first thing wrong with a `body` of `model`, naming its key. All errors are listed for
    that: the fields of requests keep them few."""
    item = error.errors(include_url=False)[0]
    reason = item["msg"].removeprefix("Value error, ")
    if item["type"] == "json_invalid":
        return ApiError(f"the body is not JSON: {item['ctx']['error']}")
    if not item["loc"]:
        return ApiError(f"the body: {reason[:1].lower()}{reason[1:]}")
    key = ".".join(_path(item, from_json(body)))
    param = str(item["loc"][0])
    if item["type"] == "extra_forbidden":
        return ApiError(f"{key}: unknown key", param=param, code="unknown_parameter")
    if item["type"] == "missing":
        return ApiError(f"{key}: required", param=param, code="missing_required_parameter")
    if description := model.model_fields[param].description:
        key, reason = param, f"expected {description}"
    # A prompt of a megabyte should not come back in the error.
    return ApiError(f"{key}: {reason} (got {reprlib.repr(item['input'])})", param=param)


def _path(item: Found, value: Any) -> list[str]:
    """Where in the body `value` it is: the validator's path without the names of alternatives."""
    path, last = [], len(item["loc"]) - 1
    for place, part in enumerate(item["loc"]):
        many, named = isinstance(value, list), isinstance(value, dict)
        if part in (range(len(value)) if many else value if named else ()):
            value = value[part]
        elif item["type"] != "missing" or place != last:
            continue
        path.append(str(part))
    return path
