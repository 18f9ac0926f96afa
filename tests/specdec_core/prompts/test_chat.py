"""Chats are rendered once, by the template that was asked for, and are told from plain texts."""

import json
import logging

import pytest

from specdec_core.base.errors import UserError
from specdec_core.prompts.chat import end_of_turn
from specdec_core.prompts.conversation import Conversation
from specdec_core.prompts.prompt_sets import Prompt, PromptSet, digest, load_prompts
from specdec_core.prompts.source import PromptSource
from tests.conftest import chat_tokenizer, tiny_tokenizer

QUESTION = {"messages": [{"role": "user", "content": "Why?"}]}
GUIDED = {"messages": [{"role": "system", "content": "Be brief."}, *QUESTION["messages"]]}
TURNS = {"question_id": 81, "turns": ["Why?", "Why not?"]}
PLAIN = {"question": "How many?", "answer": "3"}  # as GSM8K has it


def load(folder, tokenizer, choice, *records):
    file = folder / "set.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    return load_prompts(str(file), None, tokenizer, choice)


def texts(prompts):
    return [prompt.text for prompt in prompts]


@pytest.fixture
def tokenizer():
    return chat_tokenizer()


RENDERED = [
    "<|endoftext|>[user]Why?\n[assistant]",
    "<|endoftext|>[system]Be brief.\n[user]Why?\n[assistant]",
    "<|endoftext|>[user]Why?\n[assistant]",
]


def test_chats_are_rendered_and_plain_texts_stay_plain_unless_always_is_asked_for(
    tokenizer, tmp_path
):
    prompts = load(tmp_path, tokenizer, "auto", QUESTION, GUIDED, TURNS, PLAIN)
    assert texts(prompts) == [*RENDERED, "How many?"]
    assert [prompt.template is None for prompt in prompts] == [False, False, False, True]
    (prompt,) = load(tmp_path, tokenizer, "always", PLAIN)
    assert prompt.text == "<|endoftext|>[user]How many?\n[assistant]"


def test_a_file_names_another_template_for_all_prompts(tokenizer, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}Q: {{ m.content }} A:{% endfor %}")
    for able in (tokenizer, tiny_tokenizer()):
        prompts = load(tmp_path, able, str(file), QUESTION, PLAIN)
        assert texts(prompts) == ["Q: Why? A:", "Q: How many? A:"]


def test_none_continues_the_first_turns_text(tokenizer, tmp_path, caplog):
    prompts = load(tmp_path, tokenizer, "none", QUESTION, TURNS, PLAIN)
    assert texts(prompts) == ["Why?", "Why?", "How many?"]
    assert not caplog.records


def test_without_a_template_a_chat_is_continued_with_one_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        prompts = load(tmp_path, tiny_tokenizer(), "auto", QUESTION, TURNS, PLAIN)
        load(tmp_path, tiny_tokenizer(), "auto", PLAIN)
    assert texts(prompts) == ["Why?", "Why?", "How many?"]
    (warning,) = caplog.messages
    assert "set.jsonl: the tokenizer has no chat template" in warning


@pytest.mark.parametrize(
    ("able", "choice", "record", "message"),
    [
        (False, "always", PLAIN, r"chat template always: the tokenizer has none; name a file"),
        (False, "auto", GUIDED, r"prompt set/0: 2 messages take a chat template, and the tok"),
        (True, "none", GUIDED, r"prompt set/0: 2 messages take a chat template, and none was"),
        (True, "no.jinja", PLAIN, r"no\.jinja: no such file; a chat template is auto, always,"),
        (True, "/", PLAIN, r"/: cannot be read as a chat template: is a directory"),
    ],
)
def test_what_cannot_be_rendered_is_refused_in_a_line(able, choice, record, message, tmp_path):
    tokenizer = chat_tokenizer() if able else tiny_tokenizer()
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path, tokenizer, choice, record)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('No system\\nrole.') }}", "No system role."),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages[5].content }}", "has no element 5"),
        ("{{ messages + 1 }}", "concatenate"),
    ],
)
def test_what_a_template_refuses_names_the_prompt_and_its_reason(template, reason, tmp_path):
    with pytest.raises(UserError, match=f"prompt set/0: the chat template .*{reason}") as caught:
        load(tmp_path, chat_tokenizer(template), "auto", GUIDED)
    assert "\n" not in str(caught.value)


def test_of_several_templates_the_one_for_chats_is_taken(tmp_path):
    tokenizer = chat_tokenizer({"tool_use": "tools", "default": "chat"})
    assert texts(load(tmp_path, tokenizer, "auto", QUESTION)) == ["chat"]


def test_a_template_that_writes_the_date_is_warned_of(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        load(tmp_path, chat_tokenizer("{{ strftime_now('%Y') }}"), "auto", QUESTION)
    assert "writes the date" in caplog.text


def test_a_rendered_prompt_gets_no_second_token_of_beginning(tokenizer, tmp_path):
    chat, plain = load(tmp_path, tokenizer, "auto", GUIDED, PLAIN)
    tokens = Conversation(chat, tokenizer).tokens()
    begin = tokenizer.bos_token_id
    assert tokens[0] == begin
    assert tokens.count(begin) == 1
    messages = [{"role": m.role, "content": m.content} for m in chat.messages]
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert list(tokens) == theirs["input_ids"]
    assert list(Conversation(plain, tokenizer).tokens()) == tokenizer("How many?")["input_ids"]


def test_messages_before_the_last_are_one_prompt(tokenizer, tmp_path):
    chat = {
        "messages": [
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": "So."},
            {"role": "user", "content": "And?"},
        ]
    }
    (prompt,) = load(tmp_path, tokenizer, "auto", chat)
    assert prompt.text == "<|endoftext|>[user]Why?\n[assistant]So.\n[user]And?\n[assistant]"
    assert Conversation(prompt, tokenizer).turns == 1


class TestDigest:
    def test_of_plain_texts_is_the_same_with_any_tokenizer(self, tokenizer, tmp_path):
        for choice in ("auto", "none"):
            assert digest(load(tmp_path, tokenizer, choice, PLAIN)) == digest(
                [Prompt("", "How many?")]
            )
        assert digest(load(tmp_path, tiny_tokenizer(), "auto", TURNS)) == digest(
            [Prompt("", "Why?")]
        )

    def test_differs_by_template_even_where_the_text_does_not(self, tmp_path):
        same = ["{{ messages[0].content }}", "{{ messages[0]['content'] }}"]
        sets = [load(tmp_path, chat_tokenizer(template), "auto", TURNS) for template in same]
        sets.append(load(tmp_path, chat_tokenizer(), "none", TURNS))
        assert [texts(prompts) for prompts in sets] == [["Why?"]] * 3
        assert len({digest(prompts) for prompts in sets}) == 3

    def test_differs_by_turns_that_are_asked_later(self, tokenizer, tmp_path):
        other = {**TURNS, "turns": ["Why?", "How?"]}
        digests = {digest(load(tmp_path, tokenizer, "auto", record)) for record in (TURNS, other)}
        assert len(digests) == 2

    def test_template_is_never_taken_for_a_text(self):
        rendered = Prompt("", "a", template="b")
        assert digest([rendered]) != digest([Prompt("", "a"), Prompt("", "b")])
        assert digest([rendered, Prompt("", "c")]) != digest(
            [rendered.__class__("", "a", turns=("c",), template="b")]
        )


class TestDocuments:
    """Plans and recordings of plain texts are, to the letter, what they were without a choice."""

    def test_what_is_left_open_is_not_written(self, tokenizer, tmp_path):
        plain = PromptSet.of("set", load(tmp_path, tokenizer, "auto", PLAIN))
        assert set(plain.model_dump()) == {"source", "count", "digest"}
        assert plain.label == "set"
        assert set(PromptSource().model_dump(mode="json")) == {"source", "limit"}

    @pytest.mark.parametrize(
        ("choice", "record", "label"),
        [
            ("auto", QUESTION, "set, chats in the tokenizer's template"),
            ("none", QUESTION, "set, without a chat template"),
            ("always", PLAIN, "set, chat template always"),
        ],
    )
    def test_what_was_chosen_is_written_and_read(self, choice, record, label, tokenizer, tmp_path):
        used = PromptSet.of("set", load(tmp_path, tokenizer, choice, record), choice)
        assert PromptSet.model_validate_json(used.model_dump_json()) == used
        assert (used.chat_template, used.label) == (choice, label)
        asked = PromptSource(chat_template=choice)
        assert PromptSource.model_validate(asked.model_dump()) == asked


def test_the_templates_end_of_a_turn_is_the_special_token_behind_an_answer():
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>\n{% endfor %}"
    tokenizer = chat_tokenizer(turns)
    assert end_of_turn(tokenizer) == frozenset()  # no separate token, but text
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    (end,) = end_of_turn(tokenizer)
    assert tokenizer.decode([end]) == "<|end|>"
    assert end_of_turn(chat_tokenizer("{{ raise_exception('never') }}")) == frozenset()
    assert end_of_turn(tiny_tokenizer()) == frozenset()
