"""Chats by the openai client: the template's prompt, answered with the engine's text."""

from typing import Any

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
