"""Which replica a request goes to: one that holds the beginning of its sequence, unless it is much
busier than another; else the least busy one.

A replica does not prefill what its cache holds (:mod:`specdec_core.engine.prefixes`), so the next
turn of a chat is best answered where the turns before it were. But a request that waits for a slot
loses more time than its prefill takes. So the replica with the longest common beginning gets it
while it has at most half a batch (`slots` / 2 requests) more than the least busy one: then the
request waits for about half of an answer's time at most, and smaller differences come and go.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

BLOCK = 16  # tokens that are compared together

Reason = Literal["prefix", "busy", "load"]


class Choice(NamedTuple):
    """Replicas in the order of preference, and the reason for the first one: it holds the
    beginning; the one that holds it is too busy; none holds it."""

    replicas: list[str]
    reason: Reason


class Prefixes:
    """Remembers which sequences were sent to which replica. A slot keeps its sequence until another
    request enters it, so a replica holds about its last `slots` sequences."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._sent: dict[str, deque[list[int]]] = {}
        self._turns = Counter[str]()  # submissions; of equals, the one with fewest is first

    def choose(self, tokens: Sequence[int], load: Mapping[str, int]) -> Choice:
        """Where a sequence goes. `load` has the unfinished requests of each replica; replicas that
        are not in it are forgotten."""
        for gone in self._sent.keys() - load.keys():
            del self._sent[gone], self._turns[gone]
        by_load = sorted(load, key=lambda replica: (load[replica], self._turns[replica]))
        if len(by_load) < 2:
            return Choice(by_load, "load")
        blocks = list(_blocks(tokens))
        held = {
            replica: max((_common(sent, blocks) for sent in self._sent.get(replica, ())), default=0)
            for replica in load
        }
        longest = max(held.values())
        if not longest:
            return Choice(by_load, "load")
        best = next(replica for replica in by_load if held[replica] == longest)
        if load[best] - load[by_load[0]] > self.slots // 2:
            return Choice(by_load, "busy")
        return Choice([best, *(replica for replica in by_load if replica != best)], "prefix")

    def sent(self, replica: str, tokens: Sequence[int]) -> None:
        """A replica has taken the sequence."""
        self._turns[replica] += 1
        known = self._sent.setdefault(replica, deque(maxlen=self.slots))
        known.append(list(_blocks(tokens)))


def _blocks(tokens: Sequence[int]) -> Iterator[int]:
    """A hash for each whole block of a sequence: of all tokens up to its end."""
    known = 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        known = hash((known, tuple(tokens[end - BLOCK : end])))
        yield known


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of blocks that two sequences have in common at their beginning. As a hash stands
    for all blocks before it, the last common one is found by bisection."""
    blocks = range(min(len(first), len(second)))
    return bisect_left(blocks, True, key=lambda block: first[block] != second[block])
