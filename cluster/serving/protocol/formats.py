"""The format of an answer's text: OpenAI's `response_format`, or a regular expression."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from cluster.serving.protocol.fields import Part, Text
from specdec_core.tokens.grammar import Grammar


class TextFormat(Part):
    type: Literal["text"]

    @property
    def grammar(self) -> None:
        """Any text."""


class JsonObject(Part):
    type: Literal["json_object"]

    @property
    def grammar(self) -> Grammar:
        return Grammar("json_object")


class Schema(Part):
    """A JSON schema. The text always follows it, with or without `strict`."""

    name: str | None = None
    description: str | None = None
    definition: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchema(Part):
    type: Literal["json_schema"]
    json_schema: Schema

    @property
    def grammar(self) -> Grammar:
        return Grammar("json_schema", json.dumps(self.json_schema.definition))


class Regex(Part):
    """A regular expression for the text as a whole."""

    type: Literal["regex"]
    regex: Text

    @property
    def grammar(self) -> Grammar:
        return Grammar("regex", self.regex)


ResponseFormat = Annotated[
    TextFormat | JsonObject | JsonSchema | Regex, Field(discriminator="type")
]
