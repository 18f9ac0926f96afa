"""Tools by the openai client: the template gets them, and calls come back parsed."""

import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator

from cluster.serving.http.prompts import Prompts
from cluster.serving.http.routes.chat import ChatRequest
from cluster.serving.protocol.errors import ApiError
from cluster.serving.protocol.tools import CallReader, CallSyntax, Tool, ToolCall
from specdec_core.config import Configuration
from specdec_core.servers.process import running
from specdec_core.tokens.detokenising import StreamDecoder
from specdec_core.tokens.grammar import Grammar
from tests.conftest import chat_tokenizer, tiny_tokenizer
from tests.local_server import engine_server

# Shortened from the models' own.
HERMES = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }} {% endfor %}</tools>"
    "{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}"
    '{% for call in m.tool_calls %}<tool_call>\n{"name": "{{ call.function.name }}",'
    ' "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}{% endif %}\n'
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
LLAMA = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{% if 'tool_calls' in m %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters":'
    " {{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}"
    "{{ call.function | tojson }}{% endfor %}]{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
OTHER = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
HERMES_MARKS = CallSyntax("<tool_call>", "</tool_call>")
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/digit"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"digit": {"enum": [1, 2]}},
}


def named(name, **function):
    return {"type": "function", "function": {"name": name, **function}}


TOOLS: Any = [named(name, parameters=PARAMETERS) for name in ("add", "drop")]
OFFERED = [Tool.model_validate(tool) for tool in TOOLS]
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tools_client(chat_pair):
    pair = replace(chat_pair, tokenizer=chat_tokenizer(HERMES))
    with running(engine_server(pair, Configuration(), slots=4)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def answered(client, **asked):
    return client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **asked})


def streamed(client, **asked):
    """The choice that the client's own helper puts together from a stream."""
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, **asked) as stream:
        return stream.get_final_completion().choices[0]


def calls(choice):
    called = choice.message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in called]


def test_a_call_that_has_to_be_follows_the_tools_schema(tools_client):
    for wanted in ("required", named("drop")):
        asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": wanted, "max_tokens": 64}
        (choice,) = answered(tools_client, **asked).choices
        ((name, arguments),) = calls(choice)
        assert name in (("add", "drop") if wanted == "required" else ("drop",))
        Draft202012Validator(PARAMETERS).validate(arguments)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        again = streamed(tools_client, **asked)
        assert calls(again) == [(name, arguments)]
        assert again.finish_reason == "tool_calls"


WRITTEN = 'so <tool_call>\\n\\{"name": "add", "arguments": \\{"a": [12]\\}\\}\\n</tool_call>'


def test_a_models_calls_come_back_parsed(tools_client, monkeypatch):
    # The tiny model writes calls because a grammar makes it.
    made = property(lambda body: ("tools", Grammar("regex", f"{WRITTEN}({WRITTEN})?")))
    monkeypatch.setattr(ChatRequest, "grammar", made)
    asked: dict[str, Any] = {"tools": TOOLS, "max_tokens": 200, "n": 2, "seed": 1}
    answer = answered(tools_client, temperature=1.5, **asked)
    for choice in answer.choices:
        assert calls(choice)
        assert {name for name, _ in calls(choice)} == {"add"}
        assert choice.message.content.strip(" so") == ""
        assert choice.finish_reason == "tool_calls"
    again = streamed(tools_client, temperature=1.5, **asked)
    assert calls(again) == calls(answer.choices[0])
    assert again.message.content == answer.choices[0].message.content
    message = answer.choices[0].message
    chat = [*MESSAGES, message]
    results = [{"role": "tool", "tool_call_id": c.id, "content": "3"} for c in message.tool_calls]
    monkeypatch.undo()
    answered(tools_client, messages=[*chat, *results], tools=TOOLS, max_tokens=4)
    single = {**asked, "parallel_tool_calls": False}
    monkeypatch.setattr(ChatRequest, "grammar", made)
    assert len(calls(streamed(tools_client, temperature=1.5, **single))) == 1


def test_without_a_call_an_answer_is_text(tools_client):
    def text(**asked):
        return answered(tools_client, max_tokens=12, **asked).choices[0]

    assert text(tools=TOOLS, tool_choice="none") == text()
    offered = text(tools=TOOLS)
    assert offered.message.content
    assert (offered.message.tool_calls, offered.finish_reason) == (None, "length")


@pytest.mark.parametrize(
    ("asked", "param", "sentence"),
    [
        ({"tool_choice": "required"}, "tool_choice", "no such tool"),
        ({"tools": TOOLS, "tool_choice": named("other")}, "tool_choice", "no such tool"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools", "tools.0.function.name: requ"),
    ],
)
def test_what_does_not_go_together_is_refused(tools_client, asked, param, sentence):
    with pytest.raises(openai.BadRequestError, match=sentence) as refused:
        answered(tools_client, **asked)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        (HERMES, HERMES_MARKS),
        (LLAMA, CallSyntax()),
        (MISTRAL, CallSyntax("[TOOL_CALLS]")),
        (OTHER, None),
        ({"default": "{{ messages[0].content }}", "tool_use": HERMES}, HERMES_MARKS),
    ],
)
def test_the_format_of_calls_is_what_the_template_writes(template, syntax):
    prompts = Prompts(chat_tokenizer(template))
    assert prompts.takes_tools
    assert prompts.call_syntax == syntax
    tokens = prompts.of_chat(ChatRequest(messages=MESSAGES, tools=OFFERED), 4096)
    assert "add" in prompts.tokenizer.decode(tokens)


def test_a_template_without_tools_takes_none():
    with pytest.raises(ApiError, match="tools: the chat template of this model takes no tools"):
        Prompts(chat_tokenizer()).of_chat(ChatRequest(messages=MESSAGES, tools=OFFERED), 4096)


ONE, TWO = '{"name": "add", "arguments": {"a": 1}}', '{"name": "drop", "parameters": {}}'
BOTH = [("add", {"a": 1}), ("drop", {})]


@pytest.mark.parametrize(
    ("syntax", "text", "said", "called"),
    [
        (HERMES_MARKS, f"a<tool_call>{ONE}</tool_call>\n<tool_call>{TWO}</tool_call>", "a\n", BOTH),
        (HERMES_MARKS, "a < b <tool", "a < b <tool", []),
        (HERMES_MARKS, f"a<tool_call>{ONE[:-3]}", f"a<tool_call>{ONE[:-3]}", []),
        (HERMES_MARKS, "<tool_call>x</tool_call>", "<tool_call>x</tool_call>", []),
        (CallSyntax("[TOOL_CALLS]"), f"a[TOOL_CALLS] [{ONE}, {TWO}]", "a", BOTH),
        (CallSyntax(), f" {ONE}; {TWO}", "", BOTH),
        (CallSyntax(), f"see {ONE}", f"see {ONE}", []),
        (CallSyntax(), '{"name": "other", "parameters": {}}', None, []),
        (CallSyntax(), "[" * 100_000, None, []),
        (CallSyntax(), '{"a":' * 100_000, None, []),
        (CallSyntax(), " ", " ", []),
    ],
)
def test_calls_are_the_same_however_the_text_comes(syntax, text, said, called):
    for size in (1, 3, 7, len(text)):
        if len(text) / size > 1000:
            continue
        reader = CallReader(syntax, OFFERED)
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        told, found = "", list[ToolCall]()
        for place, piece in enumerate(pieces):
            more, new = reader.push(piece, place == len(pieces) - 1)
            told, found = told + more, found + new
        assert told == (text if said is None else said)
        values = [(call.function.name, json.loads(call.function.arguments)) for call in found]
        assert values == called
        assert reader.count == len(called)


def test_a_call_beyond_the_one_that_is_wanted_is_no_text():
    reader = CallReader(HERMES_MARKS, OFFERED, parallel=False)
    text, calls = reader.push(f"a<tool_call>{ONE}</tool_call><tool_call>{TWO}</tool_call>b", True)
    assert (text, [call.function.name for call in calls]) == ("ab", [BOTH[0][0]])
    assert reader.count == 1


def test_arguments_with_half_a_character_stay_the_text_that_came():
    """A template would write it out, and no tokenizer reads it."""
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}
    function = ToolCall.model_validate(call).variables["function"]
    assert function["arguments"] == call["function"]["arguments"]
    call["function"]["arguments"] = '{"a": "é"}'
    assert ToolCall.model_validate(call).variables["function"]["arguments"] == {"a": "é"}


def test_marks_of_calls_are_text_where_they_are_shown():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    (mark,) = tokenizer.convert_tokens_to_ids(["[TOOL_CALLS]"])
    tokens = [*tokenizer("a")["input_ids"], mark, *tokenizer("[]<|endoftext|>")["input_ids"]]
    for shown, text in ((frozenset(), "a[]"), (frozenset({mark}), "a[TOOL_CALLS][]")):
        decoder = StreamDecoder(tokenizer, shown=shown)
        assert decoder.push(tokens) + decoder.finish() == text
    assert Prompts(_mistral(tokenizer)).call_marks == {mark}


def _mistral(tokenizer):
    tokenizer.chat_template = MISTRAL
    return tokenizer
