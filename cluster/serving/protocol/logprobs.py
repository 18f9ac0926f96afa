"""Log-probabilities of tokens, in the shapes of completions and of chats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

from pydantic import BaseModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specdec_core.tokens.detokenising import REPLACEMENT
from specdec_core.tokens.statistics import TokenLogprobs

_LEAST = -9999.0  # JSON has no infinity
# The byte of each character of byte-level BPE.
_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}


class CompletionLogprobs(BaseModel):
    """The first token of an echoed prompt has no log-probability. `text_offset` counts characters
    of the tokens' texts."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class TokenTexts:
    """The texts of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.named = cache(self._named)

    def _named(self, token: int) -> tuple[str, list[int] | None]:
        """A token's text and its bytes. A token that is part of a character is named by its bytes,
        as OpenAI does: `bytes:\\xe2`. Where they are unknown, its name is what decodes of it."""
        text = str(self.tokenizer.decode([token], skip_special_tokens=False))
        name = str(self.tokenizer.convert_ids_to_tokens(token))
        if REPLACEMENT not in text:
            text = _spaces(name)[len(_spaces(text, " ")) :] + text
            return text, list(text.encode("utf-8", errors="replace"))
        data = _bytes_of(name)
        if data is None:
            return text, None
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)

    def completion(
        self,
        tokens: Sequence[TokenLogprobs],
        offset: int,
        unknown: int | None = None,
        by_id: bool = False,
    ) -> CompletionLogprobs:
        """In the shape of `/v1/completions`. The first token's text is at `offset`. The token
        `unknown`, without a log-probability, precedes `tokens`. With `by_id`, tokens are named as
        `token_id:5`, as vLLM has it."""
        named = "token_id:{}".format if by_id else self._text
        before = [] if unknown is None else [unknown]
        names = [named(token) for token in (*before, *(e.token for e in tokens))]
        return CompletionLogprobs(
            tokens=names,
            token_logprobs=[*(None for _ in before), *(max(e.logprob, _LEAST) for e in tokens)],
            top_logprobs=[*(None for _ in before), *(_tops(each, named) for each in tokens)],
            text_offset=[*accumulate(map(len, names[:-1]), initial=offset)] if names else [],
        )

    def _text(self, token: int) -> str:
        return self.named(token)[0]

    def chat(self, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """In the shape of `/v1/chat/completions`."""
        return ChatLogprobs(
            content=[
                TokenLogprob(
                    **self._entry(entry.token, entry.logprob),
                    top_logprobs=[TopLogprob(**self._entry(*top)) for top in entry.top],
                )
                for entry in tokens
            ]
        )

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        name, data = self.named(token)
        return {"token": name, "logprob": max(logprob, _LEAST), "bytes": data}


def _tops(entry: TokenLogprobs, named: Callable[[int], str]) -> dict[str, float]:
    """The most likely tokens by name. Of tokens with one name, the token itself counts, or else
    the most likely one."""
    tops: dict[str, float] = {}
    for token, value in ((entry.token, entry.logprob), *entry.top):
        tops.setdefault(named(token), max(value, _LEAST))
    return tops


def _spaces(name: str, space: str = "▁") -> str:
    """The spaces that a token begins with. SentencePiece's decoders leave out a space at the
    beginning of a text, and so of a single token."""
    return " " * (len(name) - len(name.lstrip(space)))


def _bytes_of(name: str) -> bytes | None:
    """The bytes of a token's name, in byte-level BPE (one character for each byte) or as
    SentencePiece's byte (`<0xE2>`); None for other names."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes.fromhex(name[3:5])
    if all(letter in _BYTES for letter in name):
        return bytes(_BYTES[letter] for letter in name)
    return None
