"""Prompts that begin like a text which a slot holds: that part need not be computed again.

System prompts, few-shot examples and the turns of a chat begin alike. A slot keeps its text in the
cache until another request enters, so the next turn of a chat goes on in the slot of the last one,
and a prompt that begins like that of a request which is still running begins with what that one
has: once in memory where rows can share it, see :mod:`specdec_core.models.cache.blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_LEAST = 16  # tokens; fewer, as a first token that all have, are computed as fast


@dataclass(slots=True)
class CachedPrefixes:
    """The texts of `slots` slots, whose beginnings are in the caches. `hits` counts the prompts
    that found theirs, `tokens` what need not be read for them."""

    slots: int
    hits: int = 0
    tokens: int = 0
    _texts: dict[int, Sequence[int]] = field(default_factory=dict)
    _left: list[int] = field(default_factory=list)  # free slots, the longest unused first

    def holds(self, slot: int, text: Sequence[int]) -> None:
        """From now on the slot's rows hold a beginning of `text`, which may grow."""
        self._texts[slot] = text
        if slot in self._left:
            self._left.remove(slot)

    def left(self, slot: int) -> None:
        """Nobody is in the slot any more."""
        self._left.append(slot)

    def forget(self, held: Sequence[int], room: int | None) -> list[int]:
        """The slots whose texts are to be forgotten so that those in free slots take at most `room`
        tokens (None: any number); `held` are the tokens in each slot's row."""
        forgotten = []
        if room is not None:
            kept = sum(held[slot] for slot in self._left)
            while kept > room and self._left:
                forgotten.append(slot := self._left.pop(0))
                kept -= held[slot]
        return forgotten

    def _oldest(self, free: Sequence[int]) -> int:
        """The slot of `free` whose text is missed the least: one without a text, else the one that
        was left first."""
        empty = (slot for slot in free if slot not in self._left)
        return next(empty, next((slot for slot in self._left if slot in free), free[0]))

    def find(
        self, prompt: Sequence[int], held: Sequence[int], free: Sequence[int], read: bool = True
    ) -> tuple[int, int, int]:
        """The slot of `free` to enter, and the slot and number of tokens to begin with there, all
        but the last of the prompt at most; `held` are the tokens in each slot's row. Unless it may
        be taken as `read`, a prompt begins with none, in the slot whose text it writes again: so
        that no other text is lost for it."""
        best, source = 0, (oldest := self._oldest(free))
        for slot, text in self._texts.items():
            alike = _alike(prompt, text, min(held[slot], len(prompt) - 1))
            if alike >= _LEAST and (alike, slot in free) > (best, source in free):
                best, source = alike, slot
        entered = source if source in free else oldest
        self._texts.pop(entered, None)
        if not read:
            return entered, entered, 0
        self.hits += best > 0
        self.tokens += best
        return entered, source, best


def _alike(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """How many first tokens of both are the same, up to `most`."""
    low, high = 0, min(most, len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == tuple(other[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
