"""Tools that a chat offers to the model, and the calls that its text has of them."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field

from cluster.serving.protocol.counts import optional
from cluster.serving.protocol.fields import Part
from specdec_core.tokens.grammar import Grammar

MAX_TOOLS = 128


class ToolFunction(Part):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None  # a call that has to be is always strict


class Tool(Part):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Part):
    name: str


class NamedTool(Part):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Part):
    name: str
    arguments: str  # JSON, if the model wrote JSON
    parsed_arguments: Any = optional()  # by the client


class ToolCall(Part):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = optional()

    @property
    def variables(self) -> dict[str, Any]:
        """What templates read of it: the arguments as values, which they write as JSON."""
        arguments: Any = self.function.arguments
        try:
            value = json.loads(arguments)
            arguments = value if isinstance(value, dict) else arguments
        except (ValueError, RecursionError):
            pass  # a model may write what is not JSON; the template then writes the same text
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class ToolCallDelta(BaseModel):
    """A call in an event of a stream, whole."""

    index: int
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class CallSyntax(NamedTuple):
    """How a model writes its calls: between two marks (without a second one, to the end of the
    text), or as a text of nothing else."""

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
    """The syntax in which a template has written :data:`PROBE`; None for another one."""
    return next((own for known, own in _SYNTAXES.items() if re.search(known, written)), None)


def call_grammar(tools: Sequence[Tool]) -> Grammar:
    """A call of one of the tools, as JSON and nothing else. Each schema is a document of its own,
    so that its references hold."""
    rules = [f"start: {' | '.join(f'call_{n}' for n in range(len(tools)))}"]
    for n, tool in enumerate(tools):
        schema = {"type": "object", **(tool.function.parameters or {})}
        schema["x-guidance"] = {"whitespace_flexible": False}
        begin = json.dumps(f'{{"name":"{tool.function.name}","arguments":')
        rules.append(f'call_{n}: {begin} arguments_{n} "}}"')
        rules.append(f"arguments_{n}: %json {json.dumps(schema)}")
    return Grammar("lark", "\n".join(rules))


class CallReader:
    """Separates the calls from the text of one answer while it comes. What looks like a call, and
    is none of a tool that there is, remains text."""

    def __init__(self, syntax: CallSyntax, tools: Iterable[Tool], parallel: bool = True) -> None:
        self._syntax = syntax
        self._names = {tool.function.name for tool in tools}
        self._parallel = parallel
        self._held = ""
        self._within = False  # a call
        self._plain = False  # no call can come any more
        self.count = 0  # calls so far

    def push(self, text: str, last: bool = False) -> tuple[str, list[ToolCall]]:
        """The text and the calls that are certain with this more of the answer."""
        self._held += text
        said, calls = "", []
        while (piece := self._next(last)) is not None:
            if isinstance(piece, str):
                said += piece
            else:
                calls += piece
        return said, calls

    def _next(self, last: bool) -> str | list[ToolCall] | None:
        """The next piece that is certain; None: nothing is."""
        if not self._held:
            return None
        if not self._within:
            before = self._before(last)
            said, self._held = self._held[:before], self._held[before:]
            return said or (self._next(last) if self._within else None)
        opening, closing = self._syntax
        end = self._held.find(closing, len(opening)) if closing else -1
        if end < 0 and not last:
            return None
        whole = self._held[: end + len(closing)] if end >= 0 else self._held
        self._held, self._within = self._held[len(whole) :], False
        self._plain = not closing
        body = whole.removeprefix(opening).removesuffix(closing)
        return self._calls(body) or whole

    def _before(self, last: bool) -> int:
        """How much of what is held comes before a call, for certain."""
        opening = self._syntax.opening
        if self._plain:
            return len(self._held)
        if not opening:
            begun = self._held.lstrip()
            self._within = begun.startswith("{")
            self._plain = bool(begun) and not self._within
            return 0 if self._within or (not begun and not last) else len(self._held)
        if (at := self._held.find(opening)) >= 0:
            self._within = True
            return at
        most = 0 if last else min(len(opening) - 1, len(self._held))
        tail = next((n for n in range(most, 0, -1) if opening.startswith(self._held[-n:])), 0)
        return len(self._held) - tail

    def _calls(self, text: str) -> list[ToolCall]:
        """The calls in `text`; none where it has anything else."""
        calls = []
        try:
            for value in _values(text):
                arguments = value.get("arguments", value.get("parameters"))
                if value["name"] not in self._names or not isinstance(arguments, dict):
                    return []
                written = json.dumps(arguments, ensure_ascii=False)
                function = CalledFunction(name=value["name"], arguments=written)
                calls.append(ToolCall(id=uuid.uuid4().hex[:9], function=function))
        except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
            return []  # not JSON, or not of a call
        taken = calls if self._parallel else calls[: max(1 - self.count, 0)]
        self.count += len(taken)
        return taken


def _values(text: str) -> Iterable[Any]:
    """The JSON values in `text`, those of lists one by one. Raises :class:`ValueError`."""
    rest = text.strip(" \t\r\n;")
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        yield from value if isinstance(value, list) else [value]
        rest = rest[end:].lstrip(" \t\r\n;")
