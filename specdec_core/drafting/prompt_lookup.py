"""Prompt lookup decoding (Saxena, 2023): what followed this n-gram before may follow it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from specdec_core.config.drafters import LookupSettings
from specdec_core.config.policies import MaxTokens
from specdec_core.drafting.drafter import Lookup, LookupResult, Resources, SlotState
from specdec_core.tokens.token_tree import TokenOrigin, TokenTree

Occurrence = Literal["latest", "earliest"]


class PromptLookupSettings(LookupSettings):
    """Copy what followed the last n-gram earlier in the sequence (Saxena's prompt lookup
    decoding)."""

    kind: Literal["prompt_lookup"] = "prompt_lookup"
    max_ngram: int = Field(default=3, ge=1, le=16)
    min_ngram: int = Field(default=1, ge=1, le=16)
    max_tokens: MaxTokens = 10
    occurrence: Occurrence = Field(
        default="latest",
        exclude_if=lambda value: value == "latest",  # so that ids stay as they were without it
        description="of an n-gram that came several times, after which one it copies; vLLM and"
        " transformers take the earliest",
    )

    def model_post_init(self, _: Any) -> None:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} exceeds max_ngram {self.max_ngram}")

    @property
    def label(self) -> str:
        earliest = " earliest" if self.occurrence == "earliest" else ""
        return f"prompt lookup {self.max_ngram}/{self.max_tokens}{earliest}"

    @property
    def longest_match(self) -> int:
        return self.max_ngram

    @property
    def depth(self) -> int:
        return self.max_tokens


class _Index:
    """The position after each n-gram of a growing sequence, where it came last or first."""

    def __init__(self, settings: PromptLookupSettings) -> None:
        self.sizes = range(settings.max_ngram, settings.min_ngram - 1, -1)
        self._earliest = settings.occurrence == "earliest"
        self._follower: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def extend(self, tokens: list[int]) -> None:
        for position in range(max(self._indexed, 1), len(tokens)):
            for size in self.sizes:
                if size > position:
                    continue
                ngram = tuple(tokens[position - size : position])
                if not self._earliest or ngram not in self._follower:
                    self._follower[ngram] = position
        self._indexed = len(tokens)

    def lookup(self, end: Sequence[int]) -> tuple[int | None, int]:
        """The position after the longest known n-gram that `end` ends with, and its size."""
        for size in self.sizes:
            if size <= len(end):
                start = self._follower.get(tuple(end[-size:]))
                if start is not None:
                    return start, size
        return None, 0


class PromptLookupDrafter(Lookup):
    """Proposes the continuation of the longest suffix n-gram that occurred before, after its latest
    occurrence or its earliest."""

    def __init__(self, settings: PromptLookupSettings, resources: Resources | None = None) -> None:
        self.settings = settings
        self._indices: dict[int, _Index] = {}

    def open(self, sequences: Sequence[SlotState]) -> None:
        for sequence in sequences:
            self._indices[sequence.slot] = _Index(self.settings)

    def find(self, sequence: SlotState, drafted: Sequence[int], room: int) -> LookupResult:
        index, tokens = self._indices[sequence.slot], sequence.tokens
        index.extend(tokens)
        end = [*tokens[-self.settings.max_ngram :], *drafted]
        start, size = index.lookup(end)
        if start is None:
            return LookupResult(TokenTree())
        count = min(room, self.settings.max_tokens)
        return LookupResult(
            TokenTree.chain(tokens[start : start + count], TokenOrigin.LOOKUP), size
        )
