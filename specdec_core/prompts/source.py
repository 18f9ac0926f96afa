"""Where a plan's prompts come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, PositiveInt

from specdec_core.config import Value
from specdec_core.prompts.chat import AUTO, ChatTemplate
from specdec_core.prompts.prompt_sets import Prompt, PromptSet, load_prompts


class PromptSource(Value):
    """Prompts, and how they are rendered."""

    source: str = Field(
        default="bundled:held_out",
        description="JSONL file, hub id or bundled:<name>; several, separated by commas, are mixed",
    )
    limit: PositiveInt | None = Field(default=None, description="the first n; unset, all")
    chat_template: ChatTemplate = AUTO

    def load(self, tokenizer: Any, further: int = 0) -> list[Prompt]:
        """The prompts for a pair's tokenizer, and up to `further` ones beyond the limit. Raises
        :class:`UserError` as :func:`load_prompts` does."""
        most = None if self.limit is None else self.limit + further
        return load_prompts(self.source, most, tokenizer, self.chat_template)

    def described(self, prompts: Sequence[Prompt]) -> PromptSet:
        """What identifies the prompts that were loaded."""
        return PromptSet.of(self.source, prompts, self.chat_template)
