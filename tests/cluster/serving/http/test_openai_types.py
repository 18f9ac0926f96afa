"""What OpenAI's clients may send, by the types of their own package: every field works, or is
refused by its name."""

import types
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import (
    ChatCompletionMessage,
    ChatCompletionMessageParam,
    ParsedChatCompletionMessage,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from typing_extensions import is_typeddict

ASKED = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
FIELDS = {
    "/v1/completions": completion_create_params.CompletionCreateParamsBase,
    CHAT: chat_create_params.CompletionCreateParamsBase,
    "/v1/responses": response_create_params.ResponseCreateParamsBase,
}
LEAST = {
    "/v1/completions": {"prompt": "def main(", "max_tokens": 1},
    CHAT: {"messages": ASKED, "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
}
PLAIN = {str: "tiny", int: 1, float: 1.0, bool: True, object: {}, Any: {}, type(None): None}
MOST = 5  # values of a field


def values(kind, depth=0):
    """Some values of a type; of a dictionary's those with its required keys, and each other key
    with each of its values."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in PLAIN:
        yield PLAIN[kind]
    elif origin is Literal:
        yield from parts
    elif origin in (Union, types.UnionType):
        for part in parts:
            yield from values(part, depth)
    elif origin in (Required, NotRequired):
        yield from values(parts[0], depth)
    elif is_typeddict(kind):
        hints = get_type_hints(kind)
        least = {key: next(values(hints[key], depth + 1)) for key in sorted(kind.__required_keys__)}
        yield least
        if depth < 3:
            for key, inner in hints.items():
                yield from ({**least, key: value} for value in values(inner, depth + 1))
    elif origin is dict:
        yield {}
        yield {"key": next(values(parts[1], depth + 1))}
    else:
        assert parts, kind
        yield from ([value] for value in values(parts[0], depth + 1))


@pytest.mark.parametrize("path", FIELDS)
def test_every_field_works_or_is_refused_by_its_name(chat_url, path):
    least, unnamed = LEAST[path], []
    with httpx.Client(base_url=chat_url, timeout=60) as http:
        for field, hint in get_type_hints(FIELDS[path]).items():
            tried = [] if field == "model" else list(values(hint))
            if type(None) in get_args(hint):
                tried.append(None)
            step = max(len(tried) // MOST, 1)
            for value in [*tried[::step], *tried[-1:]]:
                answer = http.post(path, json={**least, field: value})
                if answer.status_code == 200:
                    continue
                error = answer.json()["error"]
                named = error["param"] == field and error["message"].startswith(field)
                named &= f"{field}: unknown" not in error["message"]
                if answer.status_code != 400 or not named:
                    unnamed.append((field, value, answer.text))
                assert value is not None or field in least, answer.text
    assert not unnamed


NEUTRAL: dict[str, list[Any]] = {
    "reasoning_effort": [None, "none", "medium"],
    "verbosity": [None, "medium"],
    "prediction": [None, {"type": "content", "content": "hello"}],
    "audio": [None],
    "modalities": [None, ["text"]],
    "web_search_options": [None],
    "functions": [None, []],
    "function_call": [None, "none", "auto"],
    "tools": [None, []],
    "tool_choice": [None, "none", "auto"],
    "parallel_tool_calls": [None, True, False],
    "top_logprobs": [None, 0],
    "safety_identifier": [None, "someone"],
    "prompt_cache_key": [None, "key"],
    "prompt_cache_retention": [None, "in_memory"],
    "metadata": [None, {}, {"team": "red"}],
    "store": [None, False],
    "service_tier": [None, "auto", "default"],
    "logit_bias": [None, {}],
    "stop": [None, []],
}


def test_neutral_values_are_accepted_and_change_nothing(chat_url):
    least = {"messages": ASKED, "max_tokens": 4, "logprobs": False}
    with httpx.Client(base_url=chat_url, timeout=60) as http:
        usual = http.post(CHAT, json=least).json()["choices"]
        for field, tried in NEUTRAL.items():
            for value in tried:
                answer = http.post(CHAT, json={**least, field: value})
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"] == usual


YES = {"role": "assistant", "content": "yes"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    ("message", "content"),
    [
        (ChatCompletionMessage(**YES, annotations=[]), "yes"),
        (ParsedChatCompletionMessage(**YES, parsed={"a": 1}, reasoning_content="so"), "yes"),
        (ChatCompletionMessage(role="assistant", content=None, refusal="no"), "no"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        (ChatCompletionMessage(role="assistant", content=None, tool_calls=[CALL]), ""),
        ({"role": "assistant", "tool_calls": [CALL]}, ""),
    ],
)
def test_a_message_is_sent_back_as_a_client_parsed_it(client, message, content):
    def answered(said):
        chat: list[ChatCompletionMessageParam] = [*ASKED, said, {"role": "user", "content": "x"}]
        answer = client.chat.completions.create(model="tiny", messages=chat, max_tokens=8)
        return answer.choices[0].message.content or ""

    expected = answered({"role": "assistant", "content": content})
    assert answered(message) == expected
    if not isinstance(message, dict):
        assert answered(message.model_dump()) == expected
