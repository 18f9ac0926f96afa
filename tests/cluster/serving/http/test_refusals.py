"""What a request may not ask is refused by the field's name, in one sentence."""

import json
from typing import Any

import httpx
import pytest

COMPLETION, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"
LEAST = {
    COMPLETION: {"prompt": "def main(", "max_tokens": 16},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16},
    RESPONSE: {"input": "hi", "max_output_tokens": 16},
}
HINT = {"type": "text", "text": "?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
CACHED = HINT | {"cache_control": {"type": "ephemeral"}}
ADDED = "add_generation_prompt"
REASONED = {"type": "reasoning", "id": "r", "summary": []}
SHOWN = {"role": "user", "content": [{"type": "input_image", "detail": "auto"}]}
SAID = {"role": "user", "content": "hi"}
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}

LONGEST = "max_completion_tokens"
BAD_FORMAT = {"type": "json_schema", "name": "thing", "schema": {"type": "thing"}}


def says(content, **more):
    """The field of a chat's message."""
    return {"messages": [{"role": "user", "content": content, **more}]}


ROWS: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETION, {"prompt": ""}, "prompt", "empty"),
    (COMPLETION, {"prompt": ["a", 1]}, "prompt", "expected a string"),
    (COMPLETION, {"prompt": ["a"] * 65}, "prompt", "at most 64"),
    (COMPLETION, {"prompt": [1, 99999]}, "prompt", "outside"),
    (COMPLETION, {"temperature": -1}, "temperature", "greater than or equal to 0"),
    (COMPLETION, {"stop": [""]}, "stop", "none of them empty"),
    (COMPLETION, {"stop": list("abcde")}, "stop", "at most 4"),
    (COMPLETION, {"n": 0}, "n", "from 1 to 32"),
    (COMPLETION, {"prompt": ["x"] * 5, "n": 32}, "n", "more than 128 choices"),
    (COMPLETION, {"best_of": 2}, "best_of", "not supported"),
    (COMPLETION, {"min_tokens": 17}, "min_tokens", "more than max_tokens"),
    (COMPLETION, {"logit_bias": {"the": 1}}, "logit_bias", "token ids as strings"),
    (COMPLETION, {"temprature": 1}, "temprature", "unknown key"),
    (COMPLETION, {"stream_options": {}}, "stream_options", "stream: true"),
    (COMPLETION, {"response_format": {"type": "regex", "regex": "(("}}, "response_format", "regex"),
    (COMPLETION, {"response_format": BAD_SCHEMA}, "response_format", "json_schema"),
    (COMPLETION, {"response_format": {"type": "yaml"}}, "response_format", "type"),
    (CHAT, {"messages": []}, "messages", "at least 1"),
    (CHAT, says("x", role="tool"), "messages", "tool_call_id: required"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages", "content: required"),
    (CHAT, says([HINT, IMAGE]), "messages", "content.1: a part of type image_url is not"),
    (CHAT, says([CACHED]), "messages", "content.0: cache_control is not supported: prompts"),
    (CHAT, says([{"type": "text"}]), "messages", "messages.0.content.0.text: required"),
    (CHAT, says(7), "messages", "messages.0.content: "),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "is not max_completion_to"),
    (CHAT, {"max_tokens": 999}, "max_tokens", "context holds 256"),
    (CHAT, {"max_tokens": None, LONGEST: 999}, LONGEST, "max_completion_tokens is 999"),
    (CHAT, says("x" * 9999), "messages", "context holds 256"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools", "not supported"),
    (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize"),
    (CHAT, {"chat_template_kwargs": {"messages": 1}}, "messages", "the chat template cannot write"),
    (CHAT, dict.fromkeys((ADDED, "continue_final_message"), True), ADDED, "together"),
    (CHAT, {"functionz": []}, "functionz", "unknown key"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort", "reasoning_effort: expected "),
    (CHAT, {"functions": [{"name": "f"}]}, "functions", "functions: expected "),
    (CHAT, {"store": True}, "store", "store: expected "),
    (RESPONSE, {"previous_response_id": "r"}, "previous_response_id", "nothing is stored here"),
    (RESPONSE, {"conversation": "conv-1"}, "conversation", "nothing is stored here"),
    (RESPONSE, {"max_output_tokens": 999}, "max_output_tokens", "max_output_tokens is 999"),
    (RESPONSE, {"input": "x" * 9999}, "input", "context holds 256"),
    (RESPONSE, {"text": {"format": BAD_FORMAT}}, "text", "text: "),
    (RESPONSE, {"background": True}, "background", "not supported"),
    (RESPONSE, {"tools": [{"type": "web_search"}]}, "tools", "chat/completions takes functions"),
    (RESPONSE, {"input": [REASONED]}, "input", "item of type reasoning"),
    (RESPONSE, {"input": [SHOWN]}, "input", "a part of type input_image is not supported"),
    (RESPONSE, {"input": [SAID] * 1024, "instructions": "Be brief."}, "input", "at most 1023"),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), ROWS)
def test_what_cannot_be_honoured_is_refused_by_name(chat_url, path, body, param, message):
    answer = httpx.post(f"{chat_url}{path}", json=LEAST[path] | body, timeout=60)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]
    assert param in error["message"] or param in ("prompt", "messages", "input")
    assert "\n" not in error["message"]


@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("Identity", 200)])
def test_a_compressed_body_is_refused_as_that(chat_url, coding, status):
    content, headers = json.dumps(LEAST[COMPLETION]), {"content-encoding": coding}
    answer = httpx.post(f"{chat_url}{COMPLETION}", content=content, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    assert ("gzip: the body is compressed" in answer.text) == (status == 415)
