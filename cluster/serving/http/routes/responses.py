"""OpenAI's responses: a chat in another shape."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from cluster.serving.http.answer import Chunks, HttpAnswer, respond
from cluster.serving.http.bodies import JsonRequest, JsonRoute
from cluster.serving.http.openapi import streamed
from cluster.serving.http.routes.chat import chat_requests
from cluster.serving.http.service import Service
from cluster.serving.protocol.chat import ChatRequest
from cluster.serving.protocol.counts import Usage
from cluster.serving.protocol.responses import (
    Incomplete,
    OutputMessage,
    OutputText,
    Reasoning,
    Response,
    ResponseEvent,
    ResponseRequest,
    ResponseUsage,
)
from specdec_core.tokens.statistics import Generation


def router(service: Service) -> APIRouter:
    """`/v1/responses`."""
    routes = APIRouter(route_class=JsonRoute)

    @routes.post("/v1/responses", response_model=Response, responses=streamed(ResponseEvent))
    async def responses(body: ResponseRequest, request: JsonRequest) -> Any:
        return await respond(service, request, body, ResponseAnswer)

    return routes


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
