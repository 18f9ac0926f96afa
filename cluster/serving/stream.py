"""The answer to some requests, which outlives the engine that has begun it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cluster.serving.engine_loop import EngineFailed, Submission
from specdec_core.config import Configuration
from specdec_core.engine import Chunk, Request
from specdec_core.tokens.statistics import Generation, TokenLogprobs
from specdec_core.tokens.token_tree import Origin

if TYPE_CHECKING:
    from cluster.serving.rollout import Rollout
    from cluster.serving.served import Served

ATTEMPTS = 2  # engines that may fail one after the other without a new token


@dataclass
class _Answer:
    """What a request has got so far."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    sent: int = 0  # characters
    known: int = 0  # of them, those that the engine that has gone on with it will send again
    finished: bool = False

    def took(self, chunk: Chunk) -> Chunk:
        """The chunk, without what was sent before."""
        again = min(self.known, len(chunk.text))
        self.known -= again
        self.sent += len(chunk.text) - again
        self.tokens += chunk.tokens
        self.origins += chunk.origins
        self.logprobs += chunk.logprobs or []
        finished = None if chunk.finished is None else self._whole(chunk.finished)
        self.finished = finished is not None
        return replace(chunk, text=chunk.text[again:], finished=finished)

    def _whole(self, generation: Generation) -> Generation:
        if generation.logprobs is None or not self.request.written:
            return generation
        return replace(generation, logprobs=self.logprobs)

    def rest(self) -> Request:
        """What is left to do, for another engine."""
        self.known = self.sent
        written = tuple(zip(self.tokens, self.origins, strict=True))
        self.request = replace(self.request, written=written)
        return self.request


class Stream:
    """Requests in an engine: an asynchronous iterator over (index of the request, chunk) that ends
    with the last request. Where the engine fails, another one goes on with what is written so far.

    Closing it before the end, or losing it, frees the slots.
    """

    def __init__(
        self,
        rollout: Rollout,
        served: Served,
        requests: Sequence[Request],
        submission: Submission,
    ) -> None:
        self._rollout, self._served, self._submission = rollout, served, submission
        self._answers = [_Answer(request) for request in requests]

    @property
    def configuration(self) -> Configuration:
        """By which it is decoded."""
        return self._served.deployment.configuration

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk]]:
        indices, failed = [*range(len(self._answers))], 0
        while indices:
            try:
                if failed:
                    await self._go_on([self._answers[n].rest() for n in indices])
                async for place, chunk in self._submission:
                    failed = 0
                    yield indices[place], self._answers[indices[place]].took(chunk)
                return
            except EngineFailed:
                failed += 1
                if failed > ATTEMPTS:
                    raise
                indices = [n for n in indices if not self._answers[n].finished]

    async def _go_on(self, requests: Sequence[Request]) -> None:
        """Hand what is left to an engine that works."""
        self._served = await self._rollout.instead_of(self._served)
        self._submission = await self._served.loop.submit(requests, begun=True)

    def close(self) -> None:
        """Cancel the requests that are not finished; together they count as one."""
        self._submission.close()
