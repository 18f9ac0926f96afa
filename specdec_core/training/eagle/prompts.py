"""The prompts that a target answers, as tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from specdec_core.base.errors import UserError
from specdec_core.prompts.prompt_sets import file_records, load_prompts

TokenPrompt = tuple[str, tuple[int, ...]]


def token_prompts(
    source: str, tokenizer: Any, limit: int | None, longest: int
) -> list[TokenPrompt]:
    """The first `limit` prompts of a source, (id, tokens), without those of more than `longest`
    tokens. Raises :class:`UserError` for a bad source, and where none is left."""
    if source.startswith("bundled:"):
        texts = [(p.id, p.text) for p in load_prompts(source, limit, tokenizer)]
        found = [(name, tuple(tokenizer(text)["input_ids"])) for name, text in texts]
    else:
        found = list(islice(_chats(Path(source), tokenizer), limit))
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


def _chats(path: Path, tokenizer: Any) -> Iterator[TokenPrompt]:
    """A file of JSON lines with `messages`, by the tokenizer's chat template."""
    if not tokenizer.chat_template:
        raise UserError(f"{path}: chats, but the target's tokenizer has no chat template")
    for number, (where, record) in enumerate(file_records(path)):
        messages = record.get("messages") if isinstance(record, dict) else None
        if not isinstance(messages, list) or not messages:
            raise UserError(f"{where}: expected an object with messages")
        try:
            encoded = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as error:  # a template raises what it likes
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{where}: the chat template cannot write it: {reason}") from None
        yield f"{path.stem}/{number}", tuple(encoded["input_ids"])
