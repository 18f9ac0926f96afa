"""The prompts that a target answers, as tokens."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

from specdec_core.base.errors import UserError
from specdec_core.prompts.chat import AUTO
from specdec_core.prompts.conversation import Conversation
from specdec_core.prompts.prompt_sets import load_prompts

TokenPrompt = tuple[str, tuple[int, ...]]


def token_prompts(
    source: str, tokenizer: Any, limit: int | None, longest: int, chat_template: str = AUTO
) -> list[TokenPrompt]:
    """The first `limit` prompts of a source, (id, tokens), of conversations the first turn, without
    those of more than `longest` tokens. They are shuffled, always in the same way: the first
    answers are like all others. Raises :class:`UserError` for a bad source, and where none is
    left."""
    prompts = load_prompts(source, limit, tokenizer, chat_template)
    found = [(prompt.id, Conversation(prompt, tokenizer).tokens()) for prompt in prompts]
    random.Random(0).shuffle(found)
    kept = [(name, tokens) for name, tokens in found if 0 < len(tokens) <= longest]
    if not kept:
        raise UserError(f"{source}: no prompts of at most {longest} tokens in it")
    return kept


def prompts_digest(prompts: Sequence[TokenPrompt]) -> str:
    """SHA-256 over ids and tokens."""
    sha = hashlib.sha256()
    for prompt in prompts:
        sha.update(repr(prompt).encode())
    return sha.hexdigest()
