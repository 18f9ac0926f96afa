"""Prompts and chats as tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from cluster.serving.protocol.errors import ApiError
from cluster.serving.protocol.logprobs import TokenTexts
from cluster.serving.protocol.messages import Rendered
from cluster.serving.protocol.tools import PROBE, CallSyntax, Tool, ToolFunction, syntax_of
from specdec_core.base.errors import UserError
from specdec_core.prompts.chat import render, template_of
from specdec_core.prompts.prompt import Message
from specdec_core.tokens.bounds import longest_token

# Names that a template's variables cannot have.
_OPTIONS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
_NOTHING = {"type": "object", "properties": {}}


class Prompts:
    """Turns texts and chats into tokens. Long ones take a while: not on the event loop."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.template = template_of(tokenizer)
        self.texts = TokenTexts(tokenizer)
        self._longest = longest_token(tokenizer)

    def of_text(self, text: str, most: int, special: bool | None = None) -> tuple[int, ...]:
        """The tokens of a text, with the tokenizer's special tokens unless `special` is False.
        Raises :class:`ApiError`, without tokenising, for a text that certainly has more than `most`
        tokens."""
        if self._longest is not None and len(text) > most * self._longest:
            raise ApiError(
                f"the context holds {most} tokens here, but the prompt has {len(text)} characters,"
                f" of which a token has at most {self._longest}",
                param="prompt",
                code="context_length_exceeded",
            )
        return self._cut(text, special is not False)

    def _cut(self, text: str, special: bool) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def of_chat(self, asked: Rendered, most: int) -> tuple[int, ...]:
        """The tokens of a chat. The template itself writes the special tokens. Raises
        :class:`ApiError`; see :meth:`of_text`."""
        if self.template is None:
            raise ApiError(
                "messages: the tokenizer of this model has no chat template; /v1/completions takes"
                " plain texts",
                param="messages",
                code="no_chat_template",
            )
        extra = asked.chat_template_kwargs or {}
        for name in extra:
            if name in _OPTIONS:
                raise ApiError(
                    f"chat_template_kwargs.{name}: not a variable of a template",
                    param="chat_template_kwargs",
                    code="chat_template_failed",
                )
        final = bool(asked.continue_final_message)
        begun = not final if asked.add_generation_prompt is None else asked.add_generation_prompt
        options = {**extra, "add_generation_prompt": begun, "continue_final_message": final}
        template = self.template
        if asked.offered:
            template = self._tool_template
            options["tools"] = _described(asked.offered)
            if not self.takes_tools:
                raise ApiError(
                    "tools: the chat template of this model takes no tools",
                    param="tools",
                    code="tools_not_supported",
                )
        messages = [message.variables for message in asked.messages]
        try:
            text = render(messages, template, self.tokenizer, "messages", options)
        except UserError as error:
            raise ApiError(str(error), param="messages", code="chat_template_failed") from None
        return self.of_text(text, most, special=False)

    @cached_property
    def _tool_template(self) -> str:
        return template_of(self.tokenizer, "tool_use") or self.template or ""

    def _probe(self, *answers: dict[str, Any]) -> str:
        """The template's text of a tool, a question and these answers; "" if it fails."""
        function = ToolFunction(name=PROBE.function.name, description="", parameters=_NOTHING)
        tools = _described([Tool(type="function", function=function)])
        options = {"add_generation_prompt": False, "tools": tools}
        chat: list[Message | dict[str, Any]] = [Message("user", "question"), *answers]
        try:
            return render(chat, self._tool_template, self.tokenizer, "a chat", options)
        except UserError:  # a template for other chats
            return ""

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template writes the tools that it is given."""
        return PROBE.function.name in self._probe()

    @cached_property
    def call_syntax(self) -> CallSyntax | None:
        """How the model writes a call, found by letting the template write one; None: in a way
        that cannot be parsed here."""
        call = {"role": "assistant", "content": "", "tool_calls": [PROBE.variables]}
        return syntax_of(self._probe(call))

    @cached_property
    def call_marks(self) -> frozenset[int]:
        """The tokens around calls, which may be special tokens."""
        known = self.tokenizer.get_vocab()
        return frozenset(known[mark] for mark in self.call_syntax or () if mark in known)


def _described(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools for a template."""
    return [tool.model_dump(exclude_none=True) for tool in tools]


@lru_cache(maxsize=2)  # of the served model, and of one that replaces it
def prompts_of(tokenizer: Any) -> Prompts:
    """The tokenizer's :class:`Prompts`, made once."""
    return Prompts(tokenizer)
