"""Lookahead decoding (Fu et al., 2024): the target iterates a window of guesses while it verifies,
and the resulting n-grams are the candidates."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal

from pydantic import Field

from specdec_core.config import DrafterSettings, RecordingFacts, Width
from specdec_core.drafting.drafter import Drafter, Outcome, Resources, SlotState
from specdec_core.drafting.phrases import PhrasePool
from specdec_core.tokens.token_tree import ROOT, TokenOrigin, TokenTree


class LookaheadSettings(DrafterSettings):
    """The target iterates a window of guesses while it verifies, and the resulting n-grams are the
    candidates (lookahead decoding, Fu et al., 2024)."""

    kind: Literal["lookahead"] = "lookahead"
    window: Width = Field(default=5, description="W, columns of the window")
    ngram: int = Field(default=4, ge=2, le=16, description="N, tokens of an n-gram")
    guesses: Width = Field(default=5, description="G, n-grams verified at once")
    pool: int = Field(default=1000, ge=1, description="keys of the n-gram pool")
    per_key: int = Field(default=20, ge=1, description="n-grams of a key")
    from_prompt: bool = Field(default=True, description="begin with the prompt's n-grams")

    @property
    def label(self) -> str:
        return f"lookahead {self.window}/{self.ngram}/{self.guesses}"

    @property
    def depth(self) -> int:
        return self.ngram - 1 + max(self.window - 2, 0)

    @property
    def nodes(self) -> int:
        # The window's first guess is the sequence's last token.
        return (self.window + self.guesses) * (self.ngram - 1) - 1

    @property
    def reads_rejected(self) -> bool:
        return True

    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        return "the target's tokens after the window's guesses are not recorded"


class LookaheadDrafter(Drafter):
    """Proposes the latest n-grams that begin with the sequence's last token, and in the same tree
    the window that makes the next ones (the lookahead branch).

    The window's guesses are ordinary candidates: they share nodes with the n-grams, a right guess
    is accepted, and verification keeps the target's distribution when sampling, too. Where the
    window would reach beyond the end of the request, only n-grams are proposed.
    """

    def __init__(self, settings: LookaheadSettings, resources: Resources) -> None:
        self.settings = settings
        self._pools: dict[int, PhrasePool] = {}
        self._windows: dict[int, LookaheadWindow] = {}

    def open(self, sequences: Sequence[SlotState]) -> None:
        settings, size = self.settings, self.settings.ngram
        for sequence in sequences:
            slot, prompt = sequence.slot, sequence.tokens
            self._windows[slot] = LookaheadWindow(settings.window, size, prompt)
            pool = self._pools[slot] = PhrasePool(settings.pool, settings.per_key)
            if settings.from_prompt:
                for start in range(len(prompt) - size + 1):
                    pool.insert(prompt[start], prompt[start + 1 : start + size])

    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        return [self._propose(s) if s.room > 0 else TokenTree() for s in sequences]

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        ngrams = self._windows[sequence.slot].advance(outcome.choices, sequence.tokens)
        for key, *phrase in ngrams:
            self._pools[sequence.slot].insert(key, phrase)

    def close(self, sequence: SlotState) -> None:
        self._windows.pop(sequence.slot, None)
        self._pools.pop(sequence.slot, None)

    def _propose(self, sequence: SlotState) -> TokenTree:
        tree, last = TokenTree(), sequence.tokens[-1]
        for phrase in self._pools[sequence.slot].lookup(last, self.settings.guesses):
            tree.graft(ROOT, phrase[: sequence.room], TokenOrigin.CACHE)
        self._windows[sequence.slot].plant(tree, last, sequence.room)
        return tree


class LookaheadWindow:
    """Guesses at the sequence to come. Level i, column j is a guess at the token i + j places after
    the sequence's last one, which is level 0, column 0. It attends to level 0 up to its column and
    then down its column. So each column is an n-gram in progress, and a round adds a level: the
    target's choices after the last one.

    From `ngram` − 1 levels on the first one is dropped in every round, and the columns are complete
    n-grams. The window moves by one place a round, however many tokens the round adds (the
    reference implementation's default).
    """

    def __init__(self, columns: int, ngram: int, text: Sequence[int]) -> None:
        self.ngram, self.random = ngram, Random(0)
        self.levels = [self.random.choices(text, k=columns)]
        self._nodes: list[list[int]] = []  # of the levels in the round's tree

    def plant(self, tree: TokenTree, last: int, room: int) -> None:
        """Add the window to `tree`, if no guess is more than `room` places after the sequence's
        `last` token."""
        self._nodes = []
        if len(self.levels) + len(self.levels[0]) - 2 > room:
            return
        chain = [ROOT]
        self.levels[0][0] = last
        for token in self.levels[0][1:]:
            chain.append(tree.graft(chain[-1], [token], TokenOrigin.CACHE))
        self._nodes.append(chain)
        for level in self.levels[1:]:
            above = zip(self._nodes[-1], level, strict=True)
            self._nodes.append(
                [tree.graft(node, [token], TokenOrigin.CACHE) for node, token in above]
            )

    def advance(self, choices: Sequence[int], text: Sequence[int]) -> list[tuple[int, ...]]:
        """Add the level that the target chose, `choices[node + 1]` after each node of the round's
        tree; returns the n-grams that this completes. New columns are drawn from `text` at
        random."""
        nodes, self._nodes = self._nodes, []
        if not nodes:
            return []
        levels = [*self.levels, [choices[node + 1] for node in nodes[-1]]]
        if len(levels) < self.ngram:
            self.levels = [[*level[1:], self.random.choice(text)] for level in levels]
            return []
        self.levels = levels[1:]
        return list(zip(*levels, strict=True))
