"""Limits of a request, and of a key in a minute."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import ceil
from time import monotonic
from typing import TypeVar

from cluster.serving.protocol.errors import ApiError, rate_limited

MINUTE = 60.0

T = TypeVar("T")


@dataclass(frozen=True)
class RequestLimits:
    """The limits of one request; None: unlimited."""

    tokens: int | None = None  # new tokens of a choice
    seconds: float | None = None  # until the answer is complete


@dataclass(frozen=True)
class Allowance:
    """What one key may use in a minute; None: unlimited."""

    requests: int | None = None
    tokens: int | None = None  # of prompts and answers


@dataclass(slots=True, eq=False)
class WindowUse:
    """An amount that was taken from a window. Closing it gives back what was not used."""

    time: float
    amount: int
    used: int = 0

    def close(self) -> None:
        self.amount = min(self.used, self.amount)


class Window:
    """What was taken in the last minute, of at most `limit`."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._uses: deque[WindowUse] = deque()

    def take(self, amount: int, now: float) -> WindowUse | int:
        """Take `amount`. Where there is no room, returns the seconds until there is."""
        while self._uses and self._uses[0].time <= now - MINUTE:
            self._uses.popleft()
        if self.limit is not None:
            room, wait = self.limit - sum(use.amount for use in self._uses), 0
            for use in self._uses:
                if room >= amount:
                    break
                room, wait = room + use.amount, max(ceil(use.time + MINUTE - now), 1)
            if wait:
                return wait
        use = WindowUse(now, amount)
        self._uses.append(use)
        return use


class Account:
    """What one key has used of its allowance."""

    def __init__(self, allowance: Allowance, whose: str = "this key") -> None:
        self.allowance, self._whose = allowance, whose
        self._requests, self._tokens = Window(allowance.requests), Window(allowance.tokens)

    def request(self) -> None:
        """Count a request. Raises :class:`ApiError` (429)."""
        self._take(self._requests, 1, "requests")

    def tokens(self, amount: int) -> WindowUse:
        """Take the tokens that a request may use. Raises :class:`ApiError`: 429, or 400 for more
        than a whole minute's."""
        most = self.allowance.tokens
        if most is not None and amount > most:
            raise ApiError(
                f"max_tokens: prompt and answer may take {amount} tokens, but"
                f" {self._whose} has {most} a minute",
                param="max_tokens",
                code="too_many_tokens",
            )
        return self._take(self._tokens, amount, "tokens")

    def _take(self, window: Window, amount: int, name: str) -> WindowUse:
        taken = window.take(amount, monotonic())
        if isinstance(taken, WindowUse):
            return taken
        used = f"{self._whose} has used its {window.limit} {name} a minute"
        raise rate_limited(f"{used}; try again in {taken} s", taken)


@dataclass(frozen=True)
class Deadline:
    """When an answer has to be complete, `seconds` after its request; None: whenever it is."""

    seconds: float | None
    at: float | None  # by the event loop's clock

    @classmethod
    def of(cls, seconds: float | None) -> Deadline:
        """From now on."""
        now = asyncio.get_running_loop().time()
        return cls(seconds, None if seconds is None else now + seconds)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Raises :class:`ApiError` (408) where it is not."""
        try:
            async with asyncio.timeout_at(self.at):
                yield
        except TimeoutError:
            raise ApiError(
                f"the answer took longer than the {self.seconds:g} s that a request may take here",
                status=408,
                code="request_timeout",
            ) from None


async def within(items: AsyncIterable[T], deadline: Deadline) -> AsyncIterator[T]:
    """The items that come until then. Raises :class:`ApiError` (408)."""
    iterator = aiter(items)
    while True:
        try:
            async with deadline.kept():
                item = await anext(iterator)
        except StopAsyncIteration:
            return
        yield item
