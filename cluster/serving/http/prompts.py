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
from specdec_core.base.errors import UserError
from specdec_core.prompts.chat import render, template_of
from specdec_core.prompts.prompt import Message

# What a template's variables cannot be called.
_OPTIONS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


class Prompts:
    """Texts and chats as tokens of one tokenizer. It takes a while for long ones: not for the event
    loop."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.template = template_of(tokenizer)
        self.texts = TokenTexts(tokenizer)

    def of_text(self, text: str, special: bool | None = None) -> tuple[int, ...]:
        """With the special tokens that the tokenizer puts first, unless `special` is False."""
        return tuple(self.tokenizer(text, add_special_tokens=special is not False)["input_ids"])

    def of_chat(self, asked: Rendered) -> tuple[int, ...]:
        """The template writes the special tokens itself, so none are added to what it wrote. Raises
        :class:`ApiError`."""
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
        messages = [message.message for message in asked.messages]
        try:
            text = render(
                messages,
                self.template,
                self.tokenizer,
                "messages",
                add_generation_prompt=begun,
                continue_final_message=going_on,
                **extra,
            )
        except UserError as error:
            raise ApiError(str(error), param="messages", code="chat_template_failed") from None
        return self.of_text(text, special=False)

    @cached_property
    def end_of_turn(self) -> frozenset[int]:
        """The special token that the template writes after an answer, if it writes one: it ends
        answers even where the model's settings name another."""
        if self.template is None:
            return frozenset()
        question, answer = Message("user", "question"), Message("assistant", "answer")
        try:
            text = render(
                [question, answer],
                self.template,
                self.tokenizer,
                "a chat",
                add_generation_prompt=False,
            )
        except UserError:  # a template for other chats; the model's settings remain
            return frozenset()
        _, _, rest = text.rpartition(answer.content)
        tokens: Sequence[int] = self.of_text(rest, special=False)
        added = self.tokenizer.added_tokens_decoder
        special = {*self.tokenizer.all_special_ids, *(t for t, a in added.items() if a.special)}
        return frozenset(tokens[:1]) & special


@lru_cache(maxsize=2)  # of the model that is served, and of one that takes its place
def prompts_of(tokenizer: Any) -> Prompts:
    """Made once for each tokenizer."""
    return Prompts(tokenizer)
