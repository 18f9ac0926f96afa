"""Both sides of PEARL in one process; chance decides how far one gets before the other."""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from specdec_core.drafting.pearl.asynchronous_draft import AsynchronousDraft
from specdec_core.models.pair import Pair

# A round of many slots is many messages: how often the draft works while the target sends, and how
# often it handles a further message.
_TALKS, _HEARS = 0.033, 0.9


def linked(pair: Pair, link: Any) -> Pair:
    """`pair` with its draft at the other end of `link`."""
    return replace(pair, open_link=lambda: link)


class InTurns:
    """A link to a draft that works only while the target sends or receives, for a random time.
    Messages are delayed at random. `dies` is the chance that the draft dies at a receive; it
    comes back at random."""

    def __init__(self, pair: Pair, seed: int, dies: float = 0.0) -> None:
        self.pair, self.dies = pair, dies
        self.random = random.Random(seed)
        self.number, self.configured, self.connected = 0, None, False
        self.deaths = 0
        self._come()

    def _come(self) -> None:
        self.number, self.connected, self.configured = self.number + 1, True, None
        self.to_draft: deque[Any] = deque()
        self.to_target: deque[Any] = deque()
        self.draft = AsynchronousDraft(self.pair, self.to_target.append, str(self.number))

    def send(self, message: Any) -> None:
        if self.connected:
            self.to_draft.append(message)
            if self.random.random() < _TALKS:
                self._work()

    def _mail(self) -> Iterator[Any]:
        while self.to_draft and self.random.random() < _HEARS:
            yield self.to_draft.popleft()

    def _work(self) -> bool:
        """The draft handles its messages and drafts; returns whether it could draft more."""
        for message in self._mail():
            self.draft.handle(message)
        busy = True
        while busy and self.random.random() < 0.85:
            busy = self.draft.draft()
        return busy

    def receive(self, timeout: float = 0.0) -> list[Any]:
        if not self.connected:
            if self.random.random() < 0.3:
                self._come()
            return []
        if self.random.random() < self.dies:
            self.connected, self.deaths = False, self.deaths + 1
            return []
        heard: list[Any] = []
        while not heard:
            busy = self._work()
            waiting = len(self.to_target)
            heard = [self.to_target.popleft() for _ in range(self.random.randint(0, waiting))]
            if not timeout or not (self.to_draft or self.to_target or busy):
                break
        return heard
