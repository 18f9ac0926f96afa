"""Tokens to text, one after the other.

A token's text depends on its neighbours: characters are split over tokens, and SentencePiece-style
decoders drop the space at the start of a text. So a short window of tokens is decoded, and its text
beyond what is already known is new (the incremental detokenisation of TGI and vLLM).
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not a character (yet)
PROMPT_CONTEXT = 6  # prompt tokens that decide how the first generated one reads
MAX_OPEN = 64  # open window tokens after which a trailing U+FFFD counts as text


class StreamDecoder:
    """The text of one request while its tokens arrive.

    All that :meth:`push` and :meth:`finish` return, joined, is the decoded text of all tokens
    (special tokens left out) up to the first stop string, however the tokens were grouped. The
    first stop string is the one that is complete first; of two that end together, the longer.
    (Only where byte-fallback tokens never become UTF-8 may the count of U+FFFD differ.)

    Args:
        tokenizer: any transformers tokenizer.
        stop: strings, none empty, that end the text and are not part of it.
        prompt_ids: the tokens before the generated ones. Their text is not returned; it decides
            whether the first generated token starts with a space.
        free: the number of first generated tokens to which stop strings do not apply.
        shown: special tokens that are part of the text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        free: int = 0,
        shown: frozenset[int] = frozenset(),
    ):
        self.text = ""  # everything released so far
        self.stopped = False  # a stop string was found; the text ends just before it
        self.used = 0  # generated tokens up to the first stop string
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        special = {*tokenizer.all_special_ids, *(id for id, token in added if token.special)}
        self._special, self._shows = special - shown, bool(shown)
        self._stops, self._free = tuple(stop), free
        self._stop: tuple[str, ...] = ()  # those looked for now
        self._held = ""  # known text that could still become a stop string
        self._window = [t for t in prompt_ids[-PROMPT_CONTEXT:] if t not in self._special]
        self._closed = len(self._window)  # first window tokens, with complete text: context only
        self._known = self._decode(self._window)  # text of the window that needs no more tokens

    def push(self, tokens: Sequence[int]) -> str:
        """Take generated tokens; returns the text that is certain now, which may lag behind."""
        if self.stopped:
            return ""
        if self.used < self._free < self.used + len(tokens):
            end = self._free - self.used
            return self.push(tokens[:end]) + self.push(tokens[end:])
        self._stop = self._stops if self.used >= self._free else ()
        known = [token for token in tokens if token not in self._special]
        text = self._decode(self._window + known) if known else ""
        if len(tokens) > 1 and self._ends_within(text):
            return "".join(self.push([token]) for token in tokens)
        self.used += len(tokens)
        if not known:
            return ""
        self._window += known
        never_utf8 = len(self._window) - self._closed > MAX_OPEN
        complete = text if never_utf8 else text.rstrip(REPLACEMENT)
        released = self._release(self._learn(complete))
        if complete == text and text:
            # A character ends here: what is open closes and becomes the next tokens' context.
            self._window = self._window[self._closed :]
            self._closed = len(self._window)
            self._known = self._decode(self._window)
        return released

    def finish(self) -> str:
        """End the stream; returns the text held back so far."""
        if self.stopped:
            return ""
        released = self._release(self._learn(self._decode(self._window)))
        if not self.stopped:
            released += self._held
            self.text += self._held
            self._held = ""
        return released

    def _decode(self, tokens: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                tokens,
                skip_special_tokens=not self._shows,
                clean_up_tokenization_spaces=False,
            )
        )

    def _ends_within(self, text: str) -> bool:
        """Whether the tokens that give `text` must be pushed one by one: a stop string is complete
        within it, or its last character is not complete."""
        if text.endswith(REPLACEMENT):
            return True
        new = self._held + self._beyond(text) if self._stop else ""
        return any(stop in new for stop in self._stop)

    def _beyond(self, text: str) -> str:
        """The part of the window's `text` that is not known yet."""
        known = self._known
        if not text.startswith(known):
            known = commonprefix((known, text))  # noqa: RUF071 (strings, not paths)
        return text[len(known) :]

    def _learn(self, text: str) -> str:
        """The part of the window's `text` that was not known before."""
        new = self._beyond(text)
        if new:
            self._known = text
        return new

    def _release(self, new: str) -> str:
        """Append `new` text; returns what cannot be part of a stop string any more."""
        text = self._held + new
        ends = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if ends:
            keep = min(ends)[1]
            self.stopped = True
        else:
            keep = min((_tail_start(text, s) for s in self._stop), default=len(text))
        self._held = "" if self.stopped else text[keep:]
        self.text += text[:keep]
        return text[:keep]


def _tail_start(text: str, stop: str) -> int:
    """The start of the longest suffix of `text` that is a proper prefix of `stop`."""
    starts = range(max(0, len(text) - len(stop) + 1), len(text))
    return next((i for i in starts if stop.startswith(text[i:])), len(text))
