"""What a contestant decodes: a single prompt, or a conversation of several turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec_core.base.errors import UserError
from specdec_core.prompts.chat import render
from specdec_core.prompts.prompt import Message, Prompt

_TURN = ", turn "


def turn_id(prompt: str, number: int) -> str:
    """Names turn `number`, from 1, of the conversation of that id."""
    return prompt if number == 1 else f"{prompt}{_TURN}{number}"


def conversation_of(turn: str) -> str:
    """The id of the conversation that a turn of this id belongs to."""
    return turn.rpartition(_TURN)[0] or turn


@dataclass(frozen=True)
class Conversation:
    """A prompt with the tokenizer that it was loaded for: the one place where prompts become
    tokens. Each turn of a rendered conversation follows the answers before it. Without a template
    only the text of the first turn is continued."""

    prompt: Prompt
    tokenizer: Any

    @property
    def turns(self) -> int:
        """How often something is decoded."""
        return max(len(self.prompt.turns), 1) if self.prompt.template is not None else 1

    def tokens(self, answers: Sequence[str] = ()) -> tuple[int, ...]:
        """The tokens of turn number `len(answers)`, with the turns and answers before it. A
        template writes the special tokens itself, so none are added to what it wrote."""
        if self.prompt.template is None:
            return tuple(self.tokenizer(self.prompt.text)["input_ids"])
        text, messages = self.prompt.text, [*self.prompt.opening]
        for answer, question in zip(answers, self.prompt.turns[1:], strict=False):
            messages += [Message("assistant", answer), Message("user", question)]
        if answers:
            where = f"prompt {self.prompt.id}"
            text = render(messages, self.prompt.template, self.tokenizer, where)
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def answer(self, tokens: Sequence[int]) -> str:
        """The text of an answer as Spec-Bench keeps it: without special tokens and outer blanks."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    def check(self, max_new_tokens: int, max_length: int) -> None:
        """Raises :class:`UserError` unless every turn fits, however long the answers."""
        length = len(self.tokens([""] * (self.turns - 1)))
        if not length:
            raise UserError(f"prompt {self.prompt.id}: it has no tokens")
        needed = length + self.turns * max_new_tokens
        if needed > max_length:
            new = f"{self.turns} × {max_new_tokens}" if self.turns > 1 else str(max_new_tokens)
            raise UserError(
                f"prompt {self.prompt.id}: {length} tokens and {new} new ones are more than the"
                f" {max_length} that the pair holds (runner.max_length)"
            )


def conversations(
    prompts: Sequence[Prompt], tokenizer: Any, max_new_tokens: int, max_length: int
) -> list[Conversation]:
    """The prompts for their tokenizer, each checked to fit; raises :class:`UserError`."""
    asked = [Conversation(prompt, tokenizer) for prompt in prompts]
    for conversation in asked:
        conversation.check(max_new_tokens, max_length)
    return asked
