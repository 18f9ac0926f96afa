"""What a contestant decodes: a single prompt, or a conversation of several turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec_core.base.errors import UserError
from specdec_core.prompts.prompt_sets import Prompt


@dataclass(frozen=True)
class Conversation:
    """A prompt for one tokenizer. With a chat template, every turn is rendered with it, after the
    answers so far. Without one, only the first turn's text is continued, as it is."""

    prompt: Prompt
    tokenizer: Any

    @property
    def chat(self) -> bool:
        return bool(self.prompt.turns) and bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def turns(self) -> int:
        return len(self.prompt.turns) if self.chat else 1

    def tokens(self, answers: Sequence[str]) -> tuple[int, ...]:
        """The tokens of turn number `len(answers)`, with the turns and answers before it."""
        if not self.chat:
            return tuple(self.tokenizer(self.prompt.text)["input_ids"])
        messages = []
        for number, turn in enumerate(self.prompt.turns[: len(answers) + 1]):
            messages.append({"role": "user", "content": turn})
            if number < len(answers):
                messages.append({"role": "assistant", "content": answers[number]})
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return tuple(encoded["input_ids"])

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
            raise UserError(
                f"prompt {self.prompt.id}: {length} tokens and {self.turns} × {max_new_tokens}"
                f" new ones are more than the {max_length} that the pair holds (runner.max_length)"
            )


def conversations(
    prompts: Sequence[Prompt], tokenizer: Any, max_new_tokens: int, max_length: int
) -> list[Conversation]:
    """The prompts for a tokenizer, each checked to fit; raises :class:`UserError`."""
    rendered = [Conversation(prompt, tokenizer) for prompt in prompts]
    for conversation in rendered:
        conversation.check(max_new_tokens, max_length)
    return rendered
