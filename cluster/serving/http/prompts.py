"""The prompts of requests as tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from cluster.serving.protocol.chat import Rendered
from cluster.serving.protocol.errors import ApiError
from cluster.serving.protocol.logprobs import TokenTexts
from cluster.serving.protocol.tools import PROBE, CallSyntax, Tool, ToolFunction, syntax_of
from specdec_core.base.errors import UserError
from specdec_core.prompts.chat import render, template_of
from specdec_core.prompts.prompt import Message
from specdec_core.tokens.bounds import longest_token

# What a template's variables cannot be called.
_OPTIONS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
_NOTHING = {"type": "object", "properties": {}}


class Prompts:
    """Texts and chats as tokens of one tokenizer. It takes a while for long ones: not for the event
    loop."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.template = template_of(tokenizer)
        self.texts = TokenTexts(tokenizer)
        self._longest = longest_token(tokenizer)

    def of_text(self, text: str, most: int, special: bool | None = None) -> tuple[int, ...]:
        """With the special tokens that the tokenizer puts first, unless `special` is False. Raises
        :class:`ApiError` for a text that is certain to have more than `most` tokens, which is not
        cut into them."""
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
        """The template writes the special tokens itself, so none are added to what it wrote. Raises
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
        going_on = bool(asked.continue_final_message)
        begun = not going_on if asked.add_generation_prompt is None else asked.add_generation_prompt
        options = {**extra, "add_generation_prompt": begun, "continue_final_message": going_on}
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
        """What the template writes of a tool, a question and these answers; "" if it cannot."""
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
        """How the model writes a call, by what the template writes of one; None: in none of the
        ways that can be read here."""
        call = {"role": "assistant", "content": "", "tool_calls": [PROBE.variables]}
        return syntax_of(self._probe(call))

    @cached_property
    def call_marks(self) -> frozenset[int]:
        """The tokens around calls, which may be special ones."""
        known = self.tokenizer.get_vocab()
        return frozenset(known[mark] for mark in self.call_syntax or () if mark in known)


def _described(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as templates read them."""
    return [tool.model_dump(exclude_none=True) for tool in tools]


@lru_cache(maxsize=2)  # of the model that is served, and of one that takes its place
def prompts_of(tokenizer: Any) -> Prompts:
    """Made once for each tokenizer."""
    return Prompts(tokenizer)
