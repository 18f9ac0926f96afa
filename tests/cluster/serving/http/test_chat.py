"""Chats and OpenAI's responses, by its client, answered with the engine's text."""

from typing import Any

import httpx
import pytest

from cluster.serving.http.prompts import Prompts
from cluster.serving.http.routes.chat import ChatRequest
from cluster.serving.protocol.errors import ApiError
from specdec_core.engine import Request
from tests.conftest import chat_tokenizer, tiny_tokenizer

MESSAGES = [
    {"role": "system", "content": "short"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]},
]
RENDERED = "<|endoftext|>[system]short\n[user]hi\nyou\n[assistant]"


def text(alone, prompt, **options):
    tokens = tuple(alone.pair.tokenizer(prompt, add_special_tokens=False)["input_ids"])
    return alone.generate([Request("", tokens, **options)])[0].text


def test_the_answer_is_the_engines_text_after_the_templates_prompt(client, alone):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=24, max_tokens=24
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == text(alone, RENDERED, max_new_tokens=24)
    assert (choice.finish_reason, choice.logprobs) == ("length", None)
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert answer.usage.completion_tokens == 24
    assert answer.specdec["accepted"] > 0


def test_a_stream_begins_with_the_role_and_ends_with_the_counts_and_the_usage(client):
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "n": 2}
    whole = client.chat.completions.create(**asked)
    *parts, last = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    assert (last.choices, last.usage) == ([], whole.usage)
    for index, choice in enumerate(whole.choices):
        own = [part.choices[0] for part in parts if part.choices[0].index == index]
        assert [part.delta.role for part in own] == ["assistant", *[None] * (len(own) - 1)]
        assert "".join(part.delta.content or "" for part in own) == choice.message.content
        assert [part.finish_reason for part in own] == [None] * (len(own) - 1) + ["length"]
    assert parts[-1].specdec == whole.specdec
    assert {part.object for part in parts} == {"chat.completion.chunk"}


def test_a_final_message_is_continued(client, alone):
    begun = [*MESSAGES, {"role": "assistant", "content": "def f("}]
    answer = client.chat.completions.create(
        model="tiny", messages=begun, max_tokens=12, extra_body={"continue_final_message": True}
    )
    expected = text(alone, RENDERED + "def f(", max_new_tokens=12)
    assert answer.choices[0].message.content == expected


def test_without_a_number_an_answer_has_all_the_room(client):
    long = [*MESSAGES, {"role": "user", "content": "def main(argv): " * 10}]
    answer = client.chat.completions.create(
        model="tiny", messages=long, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == 256


def asked(**more):
    return ChatRequest(messages=[{"role": "user", "content": "hi"}], **more)


def test_templates_have_variables_and_may_refuse():
    template = "{{ mood }}{% if mood == 'bad' %}{{ raise_exception('no!') }}{% endif %}"
    tokenizer = chat_tokenizer(template)
    tokens = Prompts(tokenizer).of_chat(asked(chat_template_kwargs={"mood": "import"}), 64)
    assert tokenizer.decode(tokens) == "import"
    for name in ("where", "template", "tokenizer", "text"):
        named = Prompts(chat_tokenizer(f"{{{{ {name} }}}}"))
        tokens = named.of_chat(asked(chat_template_kwargs={name: "import"}), 64)
        assert tokenizer.decode(tokens) == "import"
    with pytest.raises(ApiError, match="no!") as refused:
        Prompts(tokenizer).of_chat(asked(chat_template_kwargs={"mood": "bad"}), 64)
    assert refused.value.body.error.param == "messages"
    with pytest.raises(ApiError, match="no chat template"):
        Prompts(tiny_tokenizer()).of_chat(asked(), 64)


def test_a_messages_name_is_the_templates_to_write():
    template = "{% for m in messages %}{{ m.name if 'name' in m else 'nobody' }} {% endfor %}"
    tokenizer = chat_tokenizer(template)
    said = [{"role": "user", "content": "hi", "name": name} for name in ("anne", None)]
    tokens = Prompts(tokenizer).of_chat(ChatRequest(messages=said), 64)
    assert tokenizer.decode(tokens) == "anne nobody "


ITEMS = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]


def test_a_response_is_the_chats_answer(client):
    chat = client.chat.completions.create(model="tiny", messages=ITEMS, max_tokens=12)
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
