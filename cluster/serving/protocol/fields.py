"""The kinds of values that requests have, named as in `/openapi.json`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from typing_extensions import TypeAliasType

MAX_BODY_BYTES = 8 * 2**20


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 1.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
Text = Annotated[str, Field(min_length=1)]
One = Annotated[int, Field(ge=1, le=1), WHOLE]
Zero = Annotated[float, Field(ge=0, le=0)]

# Named, so that their schemas can have the limits of the model that is served.
ModelName = TypeAliasType("ModelName", str)
NewTokens = TypeAliasType("NewTokens", Annotated[int, Field(ge=1), WHOLE])
TokenId = TypeAliasType("TokenId", Annotated[int, WHOLE])
TokenIds = TypeAliasType("TokenIds", Annotated[list[TokenId], Field(min_length=1, fail_fast=True)])


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
