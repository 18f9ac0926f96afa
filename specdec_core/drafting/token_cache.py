"""The token cache (Post-use, §5.1): phrases that were useful before are proposed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from specdec_core.config import LookupSettings, Memory, RecordingFacts, Width
from specdec_core.drafting.drafter import Lookup, LookupResult, Outcome, Resources, SlotState
from specdec_core.drafting.phrases import Phrase, PhrasePool
from specdec_core.tokens.token_tree import ROOT, TokenOrigin, TokenTree


class TokenCacheSettings(LookupSettings):
    """Phrases that were useful before, looked up by the last token (Post-use, §5.1)."""

    kind: Literal["token_cache"] = "token_cache"
    phrases: Width = Field(default=4, description="W, phrases looked up at once")
    phrase_length: int = Field(default=5, ge=1, le=32, description="β, tokens after the key")
    pool: int = Field(default=1000, ge=1, description="κ_pool, keys")
    per_key: int = Field(default=20, ge=1, description="κ_phase, phrases of a key")
    learn_from: Literal["useful", "output"] = Field(
        default="useful", description="USEFUL tokens (Eq. 7), or the output alone"
    )
    from_prompt: bool = Field(default=False, description="begin with the prompt's phrases")
    memory: Memory = "request"

    @property
    def label(self) -> str:
        shared = "shared " if self.memory == "all" else ""
        return f"{shared}token cache {self.phrases}/{self.phrase_length}"

    @property
    def longest_match(self) -> int:
        return 1  # the key

    @property
    def remembers(self) -> bool:
        return self.memory == "all"

    @property
    def depth(self) -> int:
        return self.phrase_length

    @property
    def nodes(self) -> int:
        return self.phrases * self.phrase_length

    @property
    def reads_rejected(self) -> bool:
        return self.learn_from == "useful"

    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        if self.learn_from == "output":
            return None
        return "the target's tokens after candidates that it rejects are not recorded"


@dataclass(slots=True)
class _CacheReader:
    """A request's pool, and how far it has the request's sequence."""

    pool: PhrasePool
    next_key: int  # position of the first token that has not been a key yet


class TokenCacheDrafter(Lookup):
    """Proposes the latest phrases after the sequence's last token, as a tree.

    It learns the phrases of the output, each token a key from the last of the prompt on (or, with
    `from_prompt`, from the first), as soon as `phrase_length` tokens follow it. With `learn_from`
    "useful" it also learns from USEFUL tokens that did not get into the output (see
    :func:`useful_phrases`).
    """

    def __init__(self, settings: TokenCacheSettings, resources: Resources | None = None) -> None:
        self.settings = settings
        self._shared = self._new_pool() if settings.memory == "all" else None
        self._readings: dict[int, _CacheReader] = {}

    def open(self, sequences: Sequence[SlotState]) -> None:
        for sequence in sequences:
            pool = self._new_pool() if self._shared is None else self._shared
            first = 0 if self.settings.from_prompt else len(sequence.tokens) - 1
            self._readings[sequence.slot] = _CacheReader(pool, first)

    def find(self, sequence: SlotState, drafted: Sequence[int], room: int) -> LookupResult:
        key = drafted[-1] if drafted else sequence.tokens[-1]
        tree = TokenTree()
        for phrase in self.phrases(sequence, key, self.settings.phrases):
            tree.graft(ROOT, phrase[: max(room, 0)], TokenOrigin.CACHE)
        return LookupResult(tree, 1 if len(tree) else 0)

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        if self.settings.learn_from == "output":
            return
        # The round added the path and the target's own token; no own token after a candidate that
        # arrived late, which the target has not read.
        late = bool(outcome.path) and outcome.path[-1] >= outcome.tree.read
        before = sequence.tokens[-outcome.accepted - 2 + late]
        for key, phrase in useful_phrases(outcome, before, self.settings.phrase_length):
            self.learn(sequence, key, phrase)

    def close(self, sequence: SlotState) -> None:
        reading = self._readings.pop(sequence.slot, None)
        if reading is not None and self._shared is not None:
            self._read(reading, sequence.tokens)
            for key in range(reading.next_key, len(sequence.tokens) - 1):
                reading.pool.insert(sequence.tokens[key], sequence.tokens[key + 1 :])

    def phrases(self, sequence: SlotState, key: int, count: int) -> list[Phrase]:
        """At most `count` phrases that may follow the token `key`, the latest first."""
        reading = self._readings[sequence.slot]
        self._read(reading, sequence.tokens)
        return reading.pool.lookup(key, count)

    def learn(self, sequence: SlotState, key: int, phrase: Sequence[int]) -> None:
        """Remember that `phrase` followed `key`, cut to the length of phrases."""
        pool = self._readings[sequence.slot].pool
        pool.insert(key, phrase[: self.settings.phrase_length])

    def _read(self, reading: _CacheReader, tokens: list[int]) -> None:
        length = self.settings.phrase_length
        for key in range(reading.next_key, len(tokens) - length):
            reading.pool.insert(tokens[key], tokens[key + 1 : key + 1 + length])
            reading.next_key = key + 1

    def _new_pool(self) -> PhrasePool:
        return PhrasePool(self.settings.pool, self.settings.per_key)


def useful_phrases(outcome: Outcome, before: int, length: int) -> list[tuple[int, list[int]]]:
    """Phrases, with their keys, of the USEFUL tokens that are not in the output.

    A drafted token is USEFUL when the target itself chooses it after the drafted tokens before it,
    also after a rejected one (Eq. 7). A phrase is a run of consecutive USEFUL tokens and, since the
    run is verified, the target's next token; at most `length` tokens. Its key is the token before
    it, which for the tree's first tokens is `before`.
    """
    tree, choices = outcome.tree, outcome.choices
    read = zip(tree.tokens[: tree.read], tree.parents, strict=False)
    follower = {
        parent: node for node, (token, parent) in enumerate(read) if token == choices[parent + 1]
    }
    accepted = set(outcome.path)
    phrases = []
    for parent, node in follower.items():
        if node in accepted:
            continue
        phrase: list[int] = []
        at: int | None = node
        while at is not None and len(phrase) < length:
            phrase.append(tree.tokens[at])
            last, at = at, follower.get(at)
        if len(phrase) < length:
            phrase.append(choices[last + 1])
        phrases.append((before if parent == ROOT else tree.tokens[parent], phrase))
    return phrases
