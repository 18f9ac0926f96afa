"""OpenAI's responses: a chat in another shape."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest

from cluster.serving.http.answer import HttpAnswer
from cluster.serving.http.bodies import SMALL, read_body, soon
from cluster.serving.http.openapi import RESPONSE, body_of
from cluster.serving.http.routes.chat import chat_requests
from cluster.serving.http.service import Service
from cluster.serving.protocol.chat import ChatRequest
from cluster.serving.protocol.counts import Usage
from cluster.serving.protocol.generation import parse_body
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
from specdec_core.engine import Chunk, Request
from specdec_core.tokens.statistics import Generation


def router(service: Service) -> APIRouter:
    """`/v1/responses`."""
    routes = APIRouter()

    @routes.post(
        "/v1/responses",
        response_model=Response,
        responses=RESPONSE,
        openapi_extra=body_of(ResponseRequest),
    )
    async def responses(request: HttpRequest) -> Any:
        content = await read_body(request)
        small = len(content) <= SMALL
        asked = await soon(small, parse_body, ResponseRequest, content)
        service.check_model(asked.model)
        chat = asked.chat
        requests = await soon(small and chat.response_format is None, chat_requests, service, chat)
        answer = ResponseAnswer(service, asked, chat, requests)
        return await answer.respond(request.state.account)

    return routes


class ResponseAnswer(HttpAnswer[ChatRequest]):
    prefix, end = "resp", ""

    def __init__(
        self,
        service: Service,
        asked: ResponseRequest,
        body: ChatRequest,
        requests: Sequence[Request],
    ) -> None:
        super().__init__(service, body, requests)
        self._asked, self._item = asked, f"msg-{uuid.uuid4().hex}"

    def choice(self, index: int, generation: Generation) -> OutputMessage:
        return self._message(generation)

    def whole(self, choices: list[Any], **fields: Any) -> Response:
        (message,) = choices
        usage = ResponseUsage.of(fields.pop("usage"))
        incomplete = None if message.status == "completed" else Incomplete()
        return self._response(
            message.status, [message], usage=usage, incomplete_details=incomplete, **fields
        )

    async def parts(self, chunks: AsyncIterator[tuple[int, Chunk]]) -> AsyncIterator[BaseModel]:
        numbers = count()

        def event(type: str, **fields: Any) -> ResponseEvent:
            return ResponseEvent(type=f"response.{type}", sequence_number=next(numbers), **fields)

        begun = self._response("in_progress", [])
        item: dict[str, Any] = {"output_index": 0}
        text: dict[str, Any] = {**item, "item_id": self._item, "content_index": 0}
        yield event("created", response=begun)
        yield event("in_progress", response=begun)
        yield event("output_item.added", item=self._message(None), **item)
        yield event("content_part.added", part=OutputText(text=""), **text)
        finished: Generation | None = None
        async for _, chunk in chunks:
            if chunk.text:
                yield event("output_text.delta", delta=chunk.text, logprobs=[], **text)
            finished = chunk.finished or finished
        assert finished is not None
        message = self._message(finished)
        yield event("output_text.done", text=finished.text, logprobs=[], **text)
        yield event("content_part.done", part=message.content[0], **text)
        yield event("output_item.done", item=message, **item)
        usage = Usage.of([finished])
        yield event(
            message.status, response=self.whole([message], usage=usage, **self.counts([finished]))
        )

    def _message(self, finished: Generation | None) -> OutputMessage:
        """The answer's only item; None: it is only begun."""
        if finished is None:
            return OutputMessage(id=self._item, status="in_progress", content=[])
        whole = finished.finish_reason == "stop"
        return OutputMessage(
            id=self._item,
            status="completed" if whole else "incomplete",
            content=[OutputText(text=finished.text)],
        )

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
