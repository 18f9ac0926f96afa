"""The tools that a chat offers to the model, and the calls in the model's text."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field

from cluster.serving.protocol.fields import Part, optional
from specdec_core.tokens.grammar import Grammar

MAX_TOOLS = 128


class ToolFunction(Part):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None  # a required call is always strict


class Tool(Part):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Part):
    name: str


class NamedTool(Part):
    """The choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Part):
    name: str
    arguments: str  # JSON, unless the model has written something else
    parsed_arguments: Any = optional()  # the arguments as the client has parsed them


class ToolCall(Part):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = optional()

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of a chat template, which writes the arguments as JSON."""
        arguments: Any = self.function.arguments
        try:
            value = json.loads(arguments)
            json.dumps(value, ensure_ascii=False).encode()  # half a character is no text
            arguments = value if isinstance(value, dict) else arguments
        except (ValueError, RecursionError):
            pass  # not JSON: the template writes the same text again
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class ToolCallDelta(BaseModel):
    """A whole call in an event of a stream."""

    index: int
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class CallSyntax(NamedTuple):
    """How a model writes its calls: between two marks, or from a mark to the end of the text.
    Without marks, the text is nothing but calls."""

    opening: str = ""
    closing: str = ""


PROBE = ToolCall(
    id="abcdefghi",  # Mistral's templates want nine characters
    function=CalledFunction(name="probe", arguments='{"place": "here"}'),
)
_CALL = r'\{{"name": ?"probe", ?"{key}": ?\{{"place": ?"here"\}}'
_SYNTAXES = {
    rf"<tool_call>\s*{_CALL.format(key='arguments')}\}}\s*</tool_call>": CallSyntax(
        "<tool_call>", "</tool_call>"
    ),  # Hermes, Qwen
    rf"\[TOOL_CALLS\]\s*\[{_CALL.format(key='arguments')}": CallSyntax("[TOOL_CALLS]"),  # Mistral
    _CALL.format(key="parameters") + r"\}": CallSyntax(),  # Llama 3
}


def syntax_of(written: str) -> CallSyntax | None:
    """The syntax in which a template has written :data:`PROBE`; None for an unknown one."""
    return next((own for known, own in _SYNTAXES.items() if re.search(known, written)), None)


def call_grammar(tools: Sequence[Tool]) -> Grammar:
    """A call of one of the tools, as JSON and nothing else. Each schema is a separate document, so
    that its references resolve."""
    rules = [f"start: {' | '.join(f'call_{n}' for n in range(len(tools)))}"]
    for n, tool in enumerate(tools):
        schema = {"type": "object", **(tool.function.parameters or {})}
        schema["x-guidance"] = {"whitespace_flexible": False}
        begin = json.dumps(f'{{"name":"{tool.function.name}","arguments":')
        rules.append(f'call_{n}: {begin} arguments_{n} "}}"')
        rules.append(f"arguments_{n}: %json {json.dumps(schema)}")
    return Grammar("lark", "\n".join(rules))


class CallReader:
    """Separates the calls from the text of an answer while it is written. Text that looks like a
    call, but not of a known tool, stays text."""

    def __init__(self, syntax: CallSyntax, tools: Iterable[Tool], parallel: bool = True) -> None:
        self._syntax = syntax
        self._names = {tool.function.name for tool in tools}
        self._parallel = parallel
        self._held = ""
        self._in_call = False
        self._plain = False  # no call can follow
        self.count = 0  # calls so far

    def push(self, text: str, last: bool = False) -> tuple[str, list[ToolCall]]:
        """Add `text` to the answer. Returns the text and the calls that are now certain."""
        self._held += text
        plain, calls = "", list[ToolCall]()
        while self._held:
            if not self._in_call:
                before = self._text_before_call(last)
                plain, self._held = plain + self._held[:before], self._held[before:]
                if not self._in_call:
                    break
            if (whole := self._whole_call(last)) is None:
                break
            if (found := self._parse(whole)) is None:
                plain += whole
            else:
                calls += found
        return plain, calls

    def _text_before_call(self, last: bool) -> int:
        """The number of held characters that certainly come before a call."""
        opening = self._syntax.opening
        if self._plain:
            return len(self._held)
        if not opening:
            begun = self._held.lstrip()
            self._in_call = begun.startswith("{")
            self._plain = bool(begun) and not self._in_call
            return 0 if self._in_call or (not begun and not last) else len(self._held)
        if (at := self._held.find(opening)) >= 0:
            self._in_call = True
            return at
        most = 0 if last else min(len(opening) - 1, len(self._held))
        tail = next((n for n in range(most, 0, -1) if opening.startswith(self._held[-n:])), 0)
        return len(self._held) - tail

    def _whole_call(self, last: bool) -> str | None:
        """The call that the held text begins with, marks included; None while it is incomplete."""
        opening, closing = self._syntax
        end = self._held.find(closing, len(opening)) if closing else -1
        if end < 0 and not last:
            return None
        size = end + len(closing) if end >= 0 else len(self._held)
        whole, self._held = self._held[:size], self._held[size:]
        self._in_call, self._plain = False, not closing
        return whole

    def _parse(self, whole: str) -> list[ToolCall] | None:
        """The calls in `whole`, as many as are wanted; None where it has anything else."""
        opening, closing = self._syntax
        calls = []
        try:
            for value in _values(whole.removeprefix(opening).removesuffix(closing)):
                arguments = value.get("arguments", value.get("parameters"))
                if value["name"] not in self._names or not isinstance(arguments, dict):
                    return None
                written = json.dumps(arguments, ensure_ascii=False)
                function = CalledFunction(name=value["name"], arguments=written)
                calls.append(ToolCall(id=uuid.uuid4().hex[:9], function=function))
        except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
            return None  # not JSON, or not a call
        if not self._parallel:
            calls = calls[: max(1 - self.count, 0)]
        self.count += len(calls)
        return calls


def _values(text: str) -> Iterable[Any]:
    """The JSON values in `text`; of a list, its values. Raises :class:`ValueError`."""
    rest = text.strip(" \t\r\n;")
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        yield from value if isinstance(value, list) else [value]
        rest = rest[end:].lstrip(" \t\r\n;")
