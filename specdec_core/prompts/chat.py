"""Chats: their messages, and the templates that write them as a model was taught to read them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from specdec_core.base.errors import UserError, os_reason
from specdec_core.prompts.prompt import Message, Prompt

log = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant")

# Which prompts are rendered: chats, by the tokenizer's template if it has one; all prompts, a plain
# text as a message of the user's; or none. Anything else is a file with another template, for all.
AUTO, ALWAYS, NONE = "auto", "always", "none"
ChatTemplate = Annotated[
    str,
    Field(
        # What is left open is not written, so that plans from before there was a choice resume.
        exclude_if=lambda choice: choice == AUTO,
        description="`auto`: chats by the tokenizer's template, if there is one; `always`: plain"
        " texts too, as the user's message; `none`: nothing; or a file with a template for all",
    ),
]


def read_messages(value: Any, where: str) -> tuple[Message, ...]:
    """The messages of a record; raises :class:`UserError`, naming `where` it stands, unless they
    are texts of known roles that end with the user's."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: messages: expected a list of messages (got {value!r})")
    messages = []
    for number, message in enumerate(value):
        at = f"{where}: messages.{number}"
        if not isinstance(message, dict):
            raise UserError(f"{at}: expected role and content (got {message!r})")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UserError(f"{at}: role: expected {', '.join(ROLES)} (got {role!r})")
        if not isinstance(content, str):
            raise UserError(f"{at}: content: expected a text (got {content!r})")
        name = message.get("name")
        if not isinstance(name, str | None):
            raise UserError(f"{at}: name: expected a text (got {name!r})")
        messages.append(Message(role, content, name))
    if messages[-1].role != "user":
        raise UserError(f"{where}: messages: the last is the {messages[-1].role}'s, not the user's")
    return tuple(messages)


def template_of(tokenizer: Any, name: str = "default") -> str | None:
    """The chat template of a tokenizer, if it has one; of several, the one of this name."""
    template = getattr(tokenizer, "chat_template", None)
    return (template.get(name) if isinstance(template, dict) else template) or None


def render(
    messages: Sequence[Message | Mapping[str, Any]],
    template: str,
    tokenizer: Any,
    where: str,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The text that the model continues, special tokens included.

    A message is a :class:`Message`, or the variables that the template reads. `options` are options
    of transformers' `apply_chat_template`, and variables of the template. Raises
    :class:`UserError`, naming `where` the messages stand, if the template fails."""
    given = {"add_generation_prompt": True, **(options or {})}
    try:
        text = tokenizer.apply_chat_template(
            [_variables(message) for message in messages],
            chat_template=template,
            tokenize=False,
            **given,
        )
    except Exception as error:  # a template is a program: it may fail in any way
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{where}: the chat template cannot write it: {reason}") from None
    return str(text)


def _variables(message: Message | Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates read it: without undefined variables."""
    known = asdict(message) if isinstance(message, Message) else message
    return {key: value for key, value in known.items() if value is not None}


def end_of_turn(tokenizer: Any) -> frozenset[int]:
    """The special token that the tokenizer's template writes after an answer, if it writes one."""
    if (template := template_of(tokenizer)) is None:
        return frozenset()
    answer = Message("assistant", "answer")
    options = {"add_generation_prompt": False}
    try:
        text = render([Message("user", "question"), answer], template, tokenizer, "a chat", options)
    except UserError:  # a template for other chats
        return frozenset()
    _, _, rest = text.rpartition(answer.content)
    tokens: Sequence[int] = tokenizer(rest, add_special_tokens=False)["input_ids"]
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(t for t, a in added.items() if a.special)}
    return frozenset(tokens[:1]) & special


def rendered(prompts: Sequence[Prompt], tokenizer: Any, choice: str, source: str) -> list[Prompt]:
    """The prompts of `source` as `choice` says (:data:`AUTO`, :data:`ALWAYS`, :data:`NONE` or a
    file). Without a template a chat's only message is continued as plain text. A warning says so
    where `choice` is :data:`AUTO`.

    Raises :class:`UserError` where `choice` requires a template and none exists, and for chats of
    several messages without one.
    """
    template = _chosen(choice, tokenizer, source)
    if template is None:
        _check_plain(prompts, source, choice)
        return list(prompts)
    chosen = [prompt.chat or choice != AUTO for prompt in prompts]
    if any(chosen) and "strftime_now" in template:
        log.warning("%s: the chat template writes the date: tomorrow it is another set", source)
    return [
        _rendered(prompt, template, tokenizer) if wanted else prompt
        for prompt, wanted in zip(prompts, chosen, strict=True)
    ]


def _rendered(prompt: Prompt, template: str, tokenizer: Any) -> Prompt:
    messages = prompt.opening
    text = render(messages, template, tokenizer, f"prompt {prompt.id}")
    return replace(prompt, text=text, messages=messages, template=template)


def _chosen(choice: str, tokenizer: Any, source: str) -> str | None:
    """The template that `choice` means."""
    if choice == NONE:
        return None
    if choice in (AUTO, ALWAYS):
        template = template_of(tokenizer)
        if template is None and choice == ALWAYS:
            raise UserError(
                f"{source}: chat template always: the tokenizer has none; name a file with one"
            )
        return template
    try:
        return Path(choice).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"{choice}: no such file; a chat template is {AUTO}, {ALWAYS}, {NONE} or a file with a"
            " Jinja template"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{choice}: cannot be read as a chat template: {os_reason(error)}"
        ) from None


def _check_plain(prompts: Sequence[Prompt], source: str, choice: str) -> None:
    """Raises :class:`UserError` unless every prompt can be continued as plain text."""
    for prompt in prompts:
        if len(prompt.messages) > 1:
            why = "none was asked for" if choice == NONE else "the tokenizer has none"
            raise UserError(
                f"{source}: prompt {prompt.id}: {len(prompt.messages)} messages take a chat"
                f" template, and {why}; name a file with one"
            )
    if choice == AUTO and any(prompt.chat for prompt in prompts):
        log.warning(
            "%s: the tokenizer has no chat template: the first message of a chat is continued as"
            " it is",
            source,
        )
