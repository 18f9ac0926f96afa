"""The answer to some requests, which outlives the engine that began it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from cluster.serving.engine_loop import EngineFailed, Submission
from cluster.serving.served import ServedEngine
from specdec_core.config import Configuration
from specdec_core.engine import Chunk, Request
from specdec_core.tokens.statistics import Generation, Round, TokenLogprobs
from specdec_core.tokens.token_tree import TokenOrigin

ATTEMPTS = 2  # engines that may fail one after the other without a new token

Resume = Callable[[Sequence[Request]], Awaitable[tuple[ServedEngine, Submission]]]


@dataclass
class _StreamedAnswer:
    """What a request has got so far."""

    request: Request
    index: int
    tokens: list[int] = field(default_factory=list)
    origins: list[TokenOrigin] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    rounds: list[Round] = field(default_factory=list)
    sent: int = 0  # characters
    known: int = 0  # characters that the engine which continues the request will send again

    def took(self, chunk: Chunk) -> Chunk:
        """The chunk, without what was sent before."""
        again = min(self.known, len(chunk.text))
        self.known -= again
        self.sent += len(chunk.text) - again
        self.tokens += chunk.tokens
        self.origins += chunk.origins
        self.logprobs += chunk.logprobs or []
        if self.prompt_logprobs is None:
            self.prompt_logprobs = chunk.prompt_logprobs
        self.rounds.append(chunk.round)
        finished = None if chunk.finished is None else self._whole(chunk.finished)
        return replace(chunk, text=chunk.text[again:], finished=finished)

    def _whole(self, generation: Generation) -> Generation:
        """With what earlier engines generated."""
        if not self.request.written:
            return generation
        return replace(
            generation,
            rounds=self.rounds,
            logprobs=None if generation.logprobs is None else self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )

    def rest(self) -> Request:
        """What is left to do, for another engine."""
        self.known = self.sent
        written = tuple(zip(self.tokens, self.origins, strict=True))
        wanted = self.request.prompt_logprobs and not written  # else they came with the first chunk
        self.request = replace(self.request, written=written, prompt_logprobs=wanted)
        return self.request


class Stream:
    """Requests in an engine: an asynchronous iterator over (index of the request, chunk) that ends
    with the last request. Where the engine fails, `resume` hands the rest to another one, which
    continues what is written so far. `ended` is called with the id of each request and its
    generation, None where it was given up.

    Closing it before the end, or losing it, frees the slots.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        served: ServedEngine,
        submission: Submission,
        resume: Resume,
        ended: Callable[[str, Generation | None], None],
    ) -> None:
        self.served, self._submission = served, submission
        self._resume, self._ended = resume, ended
        self._unfinished = {
            request.id: _StreamedAnswer(request, index) for index, request in enumerate(requests)
        }
        # Rounds by the drafter's arm, under each configuration: another one may have other arms.
        self.arms: list[tuple[Configuration, Counter[int | None]]] = []

    @property
    def configuration(self) -> Configuration:
        """The configuration of the latest chunk."""
        return self._submission.configuration

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk]]:
        while self._unfinished:
            chunk = await self._next()
            self._count(chunk.round)
            answer = self._unfinished[chunk.request_id]
            chunk = answer.took(chunk)
            if chunk.finished:
                del self._unfinished[chunk.request_id]
                self._ended(chunk.request_id, chunk.finished)
            yield answer.index, chunk

    async def _next(self) -> Chunk:
        """The next chunk, of another engine where this one fails."""
        found = await self._submission.chunks.get()
        for _ in range(ATTEMPTS):
            if isinstance(found, Chunk):
                break
            try:
                rest = [answer.rest() for answer in self._unfinished.values()]
                self.served, self._submission = await self._resume(rest)
                found = await self._submission.chunks.get()
            except EngineFailed as failed:
                found = failed
        if isinstance(found, Chunk):
            return found
        self.served.loop.observer.failed(self._unfinished)
        raise found

    def _count(self, round: Round) -> None:
        if not self.arms or self.arms[-1][0] is not self.configuration:
            self.arms.append((self.configuration, Counter()))
        self.arms[-1][1][round.arm] += 1

    def close(self) -> None:
        """Cancel the requests that are not finished; together they count as one."""
        self._submission.close()
        for request_id in self._unfinished:  # the engine may have failed, and not know them
            self.served.loop.observer.dropped(request_id)
            self._ended(request_id, None)
