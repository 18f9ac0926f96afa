"""Which replica a request goes to: one that holds the beginning of its text, unless it is much
busier than another; else the least busy one.

A replica does not read again what its cache holds (:mod:`specdec_core.engine.prefixes`), so the
next turn of a chat is best answered where the turns before it were. But a request that waits for a
slot loses more than the reading of its prompt. So the replica with the longest beginning gets it
while it has at most half a batch (`slots` / 2 requests) more than the least busy one: then the
request waits at most some half of an answer's time longer, and smaller differences come and go.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from time import monotonic
from typing import Literal, NamedTuple

BLOCK = 16  # tokens that are compared together
_RESERVED = 1.0  # seconds that a chosen replica may take to accept a request

Reason = Literal["prefix", "busy", "load"]
# Requests by why they went where they went: the replica holds their beginning; the one that does
# was too busy; none does. Of this process, as Ray Serve makes the router.
ROUTED: Counter[Reason] = Counter({"prefix": 0, "busy": 0, "load": 0})


class Choice(NamedTuple):
    """Replicas in the order of preference, and why the first one is."""

    replicas: list[str]
    reason: Reason


class _Sent(NamedTuple):
    replica: str
    requests: int
    until: float | None  # when it is forgotten unless the replica accepts it by then


class Prefixes:
    """Remembers which texts were sent to which replica, and how many requests each one has.

    A slot keeps its text until another request enters it, so a replica holds about its last `slots`
    texts.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._texts: dict[str, deque[list[int]]] = {}
        self._turns: Counter[str] = (
            Counter()
        )  # submissions; of equals, those with fewest come first
        self._sent: dict[Hashable, _Sent] = {}

    def choose(self, tokens: Sequence[int], replicas: Sequence[str]) -> Choice:
        """Where a text goes, of these replicas. Others are forgotten."""
        for gone in self._texts.keys() - set(replicas):
            del self._texts[gone], self._turns[gone]
        load, blocks = self.load(), list(_blocks(tokens))
        held = {
            r: max((_common(t, blocks) for t in self._texts.get(r, ())), default=0)
            for r in replicas
        }
        by_load = sorted(replicas, key=lambda replica: (load[replica], self._turns[replica]))
        longest = max(held.values(), default=0)
        if not longest:
            return Choice(by_load, "load")
        best = next(replica for replica in by_load if held[replica] == longest)
        if load[best] - load[by_load[0]] > self.slots // 2:
            return Choice(by_load, "busy")
        return Choice([best, *(r for r in by_load if r != best)], "prefix")

    def load(self) -> Counter[str]:
        """Unfinished requests by replica."""
        now, load = monotonic(), Counter[str]()
        for key, sent in [*self._sent.items()]:
            if sent.until is not None and sent.until < now:
                del self._sent[key]
            else:
                load[sent.replica] += sent.requests
        return load

    def reserve(self, key: Hashable, replica: str, requests: int) -> None:
        """A replica is about to get these requests."""
        self._sent[key] = _Sent(replica, requests, monotonic() + _RESERVED)

    def accepted(self, key: Hashable, replica: str, requests: int, tokens: Sequence[int]) -> None:
        """A replica has them; the first one's text is this."""
        self._sent[key] = _Sent(replica, requests, None)
        self._turns[replica] += 1
        texts = self._texts.setdefault(replica, deque(maxlen=self.slots))
        texts.append(list(_blocks(tokens)))

    def ended(self, key: Hashable) -> None:
        """A replica has done with them."""
        self._sent.pop(key, None)


def _blocks(tokens: Sequence[int]) -> Iterator[int]:
    """A hash for each whole block of a text: of all tokens up to its end."""
    known = 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        known = hash((known, tuple(tokens[end - BLOCK : end])))
        yield known


def _common(text: Sequence[int], other: Sequence[int]) -> int:
    """The number of blocks that two texts have in common at their beginning. As a hash stands for
    all blocks before it, the last common one tells."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
