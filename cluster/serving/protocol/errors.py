"""OpenAI's error object, and why a body is refused."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails as Found
from pydantic_core import from_json

Body = TypeVar("Body", bound=BaseModel)
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

    def named(self, names: Mapping[str, str]) -> ApiError:
        """With the name that a field has in a request of another kind."""
        found = self.body.error
        if (name := names.get(found.param or "")) is None:
            return self
        message = re.sub(rf"\b{found.param}(?=:| is )", name, found.message)
        return ApiError(message, self.status, name, found.code, found.type, self.headers)


SERVER_ERROR = ApiError("the server failed to answer", status=500, type="server_error")


def rate_limited(message: str, seconds: int) -> ApiError:
    """A request beyond a limit; there may be room in `seconds`."""
    return ApiError(
        message,
        status=429,
        code="rate_limit_exceeded",
        type="rate_limit_error",
        headers={"Retry-After": str(seconds)},
    )


def unavailable(message: str, seconds: int, code: str | None = None) -> ApiError:
    """Nothing answers now; something may in `seconds`."""
    headers = {"Retry-After": str(seconds)}
    return ApiError(message, status=503, type="server_error", code=code, headers=headers)


def conflict(param: str, reason: str) -> ApiError:
    """The field `param` does not go together with another one."""
    return ApiError(f"{param}: {reason}", param=param, code="conflicting_parameters")


def parse_body(kind: type[Body], body: bytes) -> Body:
    """Validate a request's body. Raises :class:`ApiError` (400) with the wrong key as `param`."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error, kind.model_fields, body) from None


def _refusal(error: ValidationError, fields: Mapping[str, FieldInfo], body: bytes) -> ApiError:
    """The first error in a `body`, by its key. All errors are listed for that: the fields of
    requests keep them few."""
    first = error.errors(include_url=False)[0]
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return ApiError(f"the body is not JSON: {first['ctx']['error']}")
    path = _path(first, from_json(body))
    if not path:
        return ApiError(f"the body: {reason[:1].lower()}{reason[1:]}")
    param, key = path[0], ".".join(path)
    if first["type"] == "extra_forbidden":
        return ApiError(f"{key}: unknown key", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(f"{key}: required", param=param, code="missing_required_parameter")
    if param in fields and (description := fields[param].description):
        key, reason = param, f"expected {description}"
    # The value is shortened: a prompt may have a megabyte.
    return ApiError(f"{key}: {reason} (got {reprlib.repr(first['input'])})", param=param)


def _path(found: Found, value: Any) -> list[str]:
    """The error's place in the body `value`: the validator's path without names of alternatives."""
    path, last = [], len(found["loc"]) - 1
    for place, part in enumerate(found["loc"]):
        many, named = isinstance(value, list), isinstance(value, dict)
        if part in (range(len(value)) if many else value if named else ()):
            value = value[part]
        elif found["type"] != "missing" or place != last:
            continue
        path.append(str(part))
    return path
