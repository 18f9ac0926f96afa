"""OpenAI's `/v1/responses`: a chat in another shape, without a state between requests."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from cluster.serving.http.answer import Chunks, HttpAnswer
from cluster.serving.http.routes.chat import ChatRequest, chat_requests
from cluster.serving.http.service import Service
from cluster.serving.protocol.counts import SpecDec, Usage
from cluster.serving.protocol.errors import ApiError
from cluster.serving.protocol.fields import (
    Empty,
    Labels,
    NewTokens,
    No,
    Part,
    TopP,
    neutral,
    optional,
)
from cluster.serving.protocol.formats import JsonObject, JsonSchema, Schema, TextFormat
from cluster.serving.protocol.messages import MAX_MESSAGES, TextOr, joined, text_only
from specdec_core.config import Temperature
from specdec_core.tokens.statistics import Generation

_STATELESS = "null: nothing is stored here; give the whole conversation as input"


class InputText(Part):
    """A part of a message. Parts of this server's answers have annotations and logprobs."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def _message_only(item: Any) -> Any:
    """Refuses, in a sentence, items that OpenAI takes."""
    kind = item.get("type") if isinstance(item, dict) else None
    if isinstance(kind, str) and kind != "message":
        raise ValueError(f"an item of type {kind} is not supported: give messages of text")
    return item


class InputMessage(Part):
    type: Literal["message"] | None = None
    role: Literal["user", "system", "developer", "assistant"]
    content: TextOr[Annotated[InputText, BeforeValidator(text_only)]]
    # Messages of this server's answers have these.
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class ResponseSchema(Schema):
    """A JSON schema. Here its keys stand beside its type."""

    type: Literal["json_schema"]


class TextConfig(Part):
    format: (
        Annotated[TextFormat | JsonObject | ResponseSchema, Field(discriminator="type")] | None
    ) = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Part):
    effort: Literal["none", "medium"] | None = None
    summary: Literal["auto"] | None = None


class ResponseStreamOptions(Part):
    include_obfuscation: bool | None = None  # of lengths; it is not done


class ResponseRequest(Labels):
    """The body of `POST /v1/responses`."""

    model: str | None = None
    input: TextOr[Annotated[InputMessage, BeforeValidator(_message_only)]]
    instructions: str | None = None
    max_output_tokens: NewTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    text: TextConfig | None = neutral(
        'a format of type "text", "json_object" or "json_schema", and the verbosity "medium"'
    )
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None  # the answer says that it is not stored
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    # Fields with neutral values, which clients send.
    background: No | None = neutral("false; true is not supported")
    include: list[Literal["reasoning.encrypted_content"]] | None = neutral(
        '[] or ["reasoning.encrypted_content"], of which there is none'
    )
    tools: Empty | None = neutral("[]; /v1/chat/completions takes functions as tools")
    tool_choice: Literal["none", "auto"] | None = neutral(
        '"none" or "auto"; tools are not supported'
    )
    truncation: Literal["disabled"] | None = neutral('"disabled"; what is too long is refused')
    reasoning: Reasoning | None = neutral('the effort "none" or "medium"; others are not supported')
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = neutral(
        "0; /v1/chat/completions has log-probabilities"
    )
    previous_response_id: None = neutral(_STATELESS)
    conversation: None = neutral(_STATELESS)
    prompt: None = neutral("null; no prompts are stored here")
    context_management: Empty | None = neutral("[]; context management is not supported")
    access_programs: None = neutral("null; they are not supported")
    image: None = neutral("null; images are not supported")

    @property
    def names(self) -> dict[str, str]:
        """What some fields of a completion or a chat are called here."""
        renamed = {"max_tokens": "max_output_tokens", "response_format": "text"}
        return {"prompt": "input", "messages": "input"} | renamed

    @property
    def chat(self) -> ChatRequest:
        """The same request as a chat. Raises :class:`ApiError` for too many messages."""
        messages: list[Any] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += [{"role": m.role, "content": joined(m.content)} for m in self.input]
        if len(messages) > MAX_MESSAGES:
            raise ApiError(
                f"input: at most {MAX_MESSAGES - 1} messages beside instructions", param="input"
            )
        wanted: Any = self.text.format if self.text else None
        if isinstance(wanted, ResponseSchema):
            wanted = JsonSchema(type="json_schema", json_schema=wanted)
        return ChatRequest(
            model=self.model,
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            response_format=wanted,
            stream=self.stream,
        )


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class CachedTokens(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningTokens(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens = ReasoningTokens()
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        details = usage.prompt_tokens_details
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=CachedTokens(
                cached_tokens=details.cached_tokens if details else 0
            ),
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
        )


class Incomplete(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Response(BaseModel):
    """The answer, with the fields of the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    system_fingerprint: str  # the configuration's id
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: Reasoning
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["none", "auto"]
    tools: list[Any] = []
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    specdec: SpecDec | None = optional()


class ResponseEvent(BaseModel):
    """One event of a stream. Its other fields depend on its type, as OpenAI's do."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


class ResponseAnswer(HttpAnswer[ChatRequest]):
    prefix, end = "resp", ""

    def __init__(self, service: Service, asked: ResponseRequest) -> None:
        chat = asked.chat
        super().__init__(service, chat, chat_requests(service, chat))
        self._asked, self._item = asked, f"msg-{uuid.uuid4().hex}"

    def choice(self, index: int, generation: Generation) -> OutputMessage:
        whole = generation.finish_reason == "stop"
        return OutputMessage(
            id=self._item,
            status="completed" if whole else "incomplete",
            content=[OutputText(text=generation.text)],
        )

    def whole(self, choices: list[Any], **fields: Any) -> Response:
        (message,) = choices
        usage = ResponseUsage.of(fields.pop("usage"))
        incomplete = None if message.status == "completed" else Incomplete()
        return self._response(
            message.status, [message], usage=usage, incomplete_details=incomplete, **fields
        )

    async def parts(self, chunks: Chunks) -> AsyncIterator[BaseModel]:
        numbers = count()

        def event(type: str, **fields: Any) -> ResponseEvent:
            return ResponseEvent(type=f"response.{type}", sequence_number=next(numbers), **fields)

        begun = self._response("in_progress", [])
        item: dict[str, Any] = {"output_index": 0}
        text: dict[str, Any] = {**item, "item_id": self._item, "content_index": 0}
        yield event("created", response=begun)
        yield event("in_progress", response=begun)
        message = OutputMessage(id=self._item, status="in_progress", content=[])
        yield event("output_item.added", item=message, **item)
        yield event("content_part.added", part=OutputText(text=""), **text)
        finished: Generation | None = None
        async for _, chunk in chunks:
            if chunk.text:
                yield event("output_text.delta", delta=chunk.text, logprobs=[], **text)
            finished = chunk.finished or finished
        assert finished is not None
        message = self.choice(0, finished)
        yield event("output_text.done", text=finished.text, logprobs=[], **text)
        yield event("content_part.done", part=message.content[0], **text)
        yield event("output_item.done", item=message, **item)
        counts = {"usage": Usage.of([finished]), "specdec": self.counts([finished])}
        yield event(message.status, response=self.whole([message], **counts))

    def _response(self, status: Any, output: list[OutputMessage], **fields: Any) -> Response:
        asked, sampling = self._asked, self.requests[0].sampling
        assert sampling is not None
        wanted = asked.text.format if asked.text else None
        form = {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True)
        return Response(
            id=self.id,
            created_at=self.created,
            status=status,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata or {},
            model=self.service.model,
            system_fingerprint=self.configuration.id,
            output=output,
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            reasoning=asked.reasoning or Reasoning(),
            temperature=sampling.temperature,
            text={"format": form},
            tool_choice=asked.tool_choice or "auto",
            top_p=sampling.top_p or 1.0,
            user=asked.user,
            **fields,
        )
