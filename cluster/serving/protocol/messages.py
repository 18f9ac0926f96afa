"""The messages of a chat, as OpenAI's clients send them and send them back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from cluster.serving.protocol.errors import conflict
from cluster.serving.protocol.fields import Part, neutral
from cluster.serving.protocol.tools import MAX_TOOLS, NamedTool, Tool, ToolCall
from specdec_core.prompts.prompt import Message

MAX_MESSAGES = 1024
_ROLES = {"developer": "system"}  # OpenAI's newer name
_TEXTS = ("text", "refusal", "input_text", "output_text")

T = TypeVar("T")


def text_only(part: Any) -> Any:
    """Refuses, in a sentence, parts of a message that other servers take."""
    if isinstance(part, dict):
        kind = part.get("type")
        if isinstance(kind, str) and kind not in _TEXTS:
            raise ValueError(f"a part of type {kind} is not supported: this server reads text")
        for name in ("cache_control", "prompt_cache_breakpoint"):
            if part.get(name) is not None:
                raise ValueError(
                    f"{name} is not supported: prompts that begin alike share the cache by"
                    " themselves"
                )
    return part


class TextPart(Part):
    type: Literal["text"]
    text: str


class RefusalPart(Part):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


# A string, or a list of parts: errors are about the one that is meant.
TextOr = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[
        list[T], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("parts")
    ],
    Discriminator(lambda value: "parts" if isinstance(value, list) else "text"),
]
ContentPart = Annotated[
    Annotated[TextPart | RefusalPart, Field(discriminator="type")], BeforeValidator(text_only)
]
Content = TextOr[ContentPart]


def joined(content: Any) -> str:
    """The text of a content, with one line for each part."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


class _Message(Part):
    role: str
    name: str | None = None
    content: Content | None = None

    @property
    def text(self) -> str:
        return joined(self.content)

    @property
    def message(self) -> Message:
        return Message(_ROLES.get(self.role, self.role), self.text, self.name)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of a chat template."""
        return asdict(self.message)


class PromptMessage(_Message):
    """A message of the user or the system."""

    role: Literal["system", "developer", "user"]
    content: Content


class AssistantMessage(_Message):
    """A message of the model, with all that clients send back of an answer."""

    role: Literal["assistant"]
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another server's name for the same
    annotations: list[Any] | None = None
    parsed: Any = None  # the content as the client has parsed it
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        return joined(self.content) or self.refusal or ""

    @property
    def variables(self) -> dict[str, Any]:
        return {
            **super().variables,
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": [call.variables for call in self.tool_calls or ()] or None,
        }


class ToolMessage(_Message):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str

    @property
    def variables(self) -> dict[str, Any]:
        return {**super().variables, "tool_call_id": self.tool_call_id}


ChatMessage = Annotated[PromptMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Rendered(Part):
    """How messages become a prompt."""

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = neutral(
        f"at most {MAX_TOOLS} functions, each with a name and perhaps a description and"
        " parameters; other tools are not supported"
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = neutral(
        '"none", "auto", "required" or {"type": "function", "function": {"name": …}}; others are'
        " not supported"
    )

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def has_only_text(self) -> bool:
        """Whether the chat has no tools, no calls and no results of calls."""
        return not self.offered and not any(
            message.role == "tool" or (message.role == "assistant" and message.tool_calls)
            for message in self.messages
        )

    @model_validator(mode="after")
    def _check_generation_prompt(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            reason = "cannot be true together with continue_final_message"
            raise conflict("add_generation_prompt", reason)
        return self
