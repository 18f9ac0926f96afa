"""Prefix cache: a prompt that begins like a sequence which a slot holds skips that part's prefill.

System prompts, few-shot examples and the turns of a chat begin alike. A slot keeps its sequence in
the cache until another request enters. So the next turn of a chat resumes in the slot of the last
one. A prompt that begins like a running request's starts from that request's part of the cache,
which a pool of blocks holds once (:mod:`specdec_core.models.cache.blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_LEAST = 16  # tokens of a hit; fewer are computed as fast


@dataclass(slots=True)
class CachedPrefixes:
    """The sequences of all slots, as far as the caches hold them. `hits` counts the prompts with a
    prefix-cache hit, `tokens` the tokens that these did not prefill."""

    hits: int = 0
    tokens: int = 0
    _texts: dict[int, Sequence[int]] = field(default_factory=dict)  # by slot
    _left: list[int] = field(default_factory=list)  # free slots, the longest unused first

    def holds(self, slot: int, text: Sequence[int]) -> None:
        """From now on the slot's rows hold a prefix of `text`, which may grow."""
        self._texts[slot] = text
        if slot in self._left:
            self._left.remove(slot)

    def left(self, slot: int) -> None:
        """The slot is free. Its rows stay as they are."""
        self._left.append(slot)

    def forget(self, held: Sequence[int], room: int | None) -> list[int]:
        """Free slots to empty, so that free slots hold at most `room` tokens (None: any number);
        `held` are the tokens in each slot's row."""
        forgotten = []
        if room is not None:
            kept = sum(held[slot] for slot in self._left)
            while kept > room and self._left:
                forgotten.append(slot := self._left.pop(0))
                kept -= held[slot]
        return forgotten

    def _oldest(self, free: Sequence[int]) -> int:
        """The best of the `free` slots to overwrite: an empty one, else the longest unused."""
        empty = (slot for slot in free if slot not in self._left)
        return next(empty, next((slot for slot in self._left if slot in free), free[0]))

    def find(
        self, prompt: Sequence[int], held: Sequence[int], free: Sequence[int], read: bool = True
    ) -> tuple[int, int, int]:
        """The free slot to enter, the slot to copy a prefix from, and the number of its tokens: all
        but the prompt's last at most. `held` are the tokens in each slot's row. With `read` false
        nothing is copied. The prompt then enters the slot with the same sequence, so that it
        overwrites no other one."""
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
    """The length of the common prefix of two sequences, up to `most`."""
    low, high = 0, min(most, len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == tuple(other[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
