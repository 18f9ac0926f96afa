"""OpenAI's responses, by its client: a chat's text in their shape, and nothing kept."""

from typing import Any

import httpx
import pytest

MESSAGES = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]


def test_a_response_is_the_chats_answer(client):
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12)
    answer = client.responses.create(
        model="tiny", instructions="short", input="hi", max_output_tokens=12, store=True
    )
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.object, answer.status, answer.store) == ("response", "incomplete", False)
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == 12
    assert answer.specdec["accepted"] > 0


def test_a_conversation_is_given_as_it_came(client):
    asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    first = client.responses.create(model="tiny", input=asked, max_output_tokens=3)
    more = [*asked, *first.output, {"type": "message", "role": "user", "content": "more"}]
    second = client.responses.create(model="tiny", input=more, max_output_tokens=8)
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "more"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=chat, max_tokens=8)
    assert second.output_text == answer.choices[0].message.content


def test_a_stream_has_the_same_as_the_whole(client):
    asked: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 12}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage == whole.usage
    wanted = {"format": {"type": "json_schema", "name": "n", "schema": {"enum": ["a", "b"]}}}
    with client.responses.stream(model="tiny", input="hi", text=wanted) as stream:
        final = stream.get_final_response()
    assert (final.status, final.output_text in ('"a"', '"b"')) == ("completed", True)


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/version", "/v1/models", "/metrics"])
def test_head_is_answered_as_get_is_without_a_body(chat_url, path):
    with httpx.Client(base_url=chat_url, timeout=60) as http:
        head, whole = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert httpx.head(f"{chat_url}/v1/completions").status_code == 405
