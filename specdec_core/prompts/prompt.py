"""Prompts, and the digests that identify a set of prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import Field

from specdec_core.config import Document

# Precedes what only rendered prompts add to a digest: no text has 2^64 - 1 bytes.
_RENDERED = (2**64 - 1).to_bytes(8, "big")


@dataclass(frozen=True)
class Message:
    """A message of a chat. `role` is one of :data:`specdec_core.prompts.chat.ROLES`; `name`, if
    given, tells participants of one role apart."""

    role: str
    content: str
    name: str | None = None


@dataclass(frozen=True)
class Prompt:
    """A text to continue, and an id that is unique in its set. `category` is the kind of task.

    Of a chat, `messages` are a question of the user's and all messages before it. In a
    conversation, `turns` are the user's questions in their order. `template`, if there is one, is
    the chat template that wrote `text`, special tokens included.
    """

    id: str
    text: str
    category: str | None = None
    turns: tuple[str, ...] = ()
    messages: tuple[Message, ...] = ()
    template: str | None = None

    @property
    def chat(self) -> bool:
        """Whether it was written to be answered, not continued."""
        return bool(self.turns or self.messages)

    @property
    def opening(self) -> tuple[Message, ...]:
        """The messages up to the first question, which a plain text is itself."""
        return self.messages or (Message("user", self.turns[0] if self.turns else self.text),)


class PromptSet(Document):
    """Which prompts were used."""

    source: str  # "bundled:held_out", a path or a hub id
    count: int
    digest: str  # see :func:`digest`
    # How chats were to be rendered; None where that was left open and nothing was rendered, and
    # not written then, so that documents of such sets are what they were before there was a choice.
    chat_template: str | None = Field(default=None, exclude_if=lambda choice: choice is None)

    @classmethod
    def of(cls, source: str, prompts: Sequence[Prompt], chat_template: str = "auto") -> PromptSet:
        """The set of `prompts`, loaded from `source` with that choice of a chat template."""
        told = chat_template != "auto" or any(prompt.template is not None for prompt in prompts)
        return cls(
            source=source,
            count=len(prompts),
            digest=digest(prompts),
            chat_template=chat_template if told else None,
        )

    @property
    def label(self) -> str:
        """The source, and how its chats were rendered."""
        if self.chat_template is None:
            return self.source
        how = {"auto": "chats in the tokenizer's template", "none": "without a chat template"}
        return (
            f"{self.source}, {how.get(self.chat_template, f'chat template {self.chat_template}')}"
        )


def digest(prompts: Iterable[Prompt]) -> str:
    """SHA-256 over the texts in order, each preceded by its length in bytes, so that two different
    sets never hash the same bytes; of rendered prompts also over the template and the turns."""
    sha = hashlib.sha256()
    for prompt in prompts:
        _add(sha, prompt.text)
        if prompt.template is not None:
            sha.update(_RENDERED)
            for part in (prompt.template, *prompt.turns):
                _add(sha, part)
            sha.update(_RENDERED)
    return sha.hexdigest()


def _add(sha: hashlib._Hash, text: str) -> None:
    content = text.encode()
    sha.update(len(content).to_bytes(8, "big"))
    sha.update(content)
