"""A pool of phrases: what followed a token before (Post-use, §5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

Phrase = tuple[int, ...]


class PhrasePool:
    """For each key token a stack of the phrases that followed it: last in, first out.

    At most `keys` keys (κ_pool) and `per_key` phrases of each (κ_phase). A full pool forgets the
    key that was looked up least often, of equals the least recently used one. A full stack forgets
    its earliest phrase. A phrase that is inserted again moves to the top. Where one phrase is the
    beginning of another, only the longer one stays.
    """

    def __init__(self, keys: int, per_key: int) -> None:
        self.keys, self.per_key = keys, per_key
        self._stacks: dict[int, dict[Phrase, None]] = {}  # of each key, the earliest phrase first
        self._uses: dict[int, int] = {}
        self._used: dict[int, dict[int, None]] = {}  # keys by how often they were looked up

    def insert(self, key: int, phrase: Sequence[int]) -> None:
        """Remember that `phrase` (at least one token) followed `key`."""
        phrase = tuple(phrase)
        size = len(phrase)
        stack = self._stacks.get(key)
        if stack is None:
            if len(self._stacks) == self.keys:
                self._forget()
            self._stacks[key] = {phrase: None}
            self._count(key, 0)
            return
        beginnings = []
        for known in reversed(stack):
            if known[:size] == phrase:
                phrase = known
                break
            if known == phrase[: len(known)]:
                beginnings.append(known)
        for known in (*beginnings, phrase):
            stack.pop(known, None)
        stack[phrase] = None
        if len(stack) > self.per_key:
            del stack[next(iter(stack))]

    def lookup(self, key: int, count: int) -> list[Phrase]:
        """The latest `count` phrases of `key`, the last one in first."""
        stack = self._stacks.get(key)
        if stack is None or count < 1:
            return []
        uses = self._uses[key]
        del self._used[uses][key]
        if not self._used[uses]:
            del self._used[uses]
        self._count(key, uses + 1)
        return list(islice(reversed(stack), count))

    def _count(self, key: int, uses: int) -> None:
        self._uses[key] = uses
        self._used.setdefault(uses, {})[key] = None

    def _forget(self) -> None:
        """Forget the least used key."""
        fewest = min(self._used)
        least = self._used[fewest]
        key = next(iter(least))
        del least[key], self._stacks[key], self._uses[key]
        if not least:
            del self._used[fewest]
