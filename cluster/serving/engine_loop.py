"""One engine, many asyncio callers: requests share the batch's slots.

One thread waits for the engine's steps, and for its answers between two steps. So the event loop
stays free.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from time import monotonic
from typing import TypeVar

from cluster.serving.engine_process import EngineProcess
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.engine import Chunk, Request

logger = logging.getLogger(__name__)

QUEUE = 128  # requests that may wait for a slot
_RECENT = 32  # requests that tell the pace

T = TypeVar("T")


class EngineFailed(RuntimeError):
    """The engine is broken: a step raised an error or took too long, or its process ended."""


class QueueFull(Exception):
    """As many requests wait as may; there may be room in `seconds`."""

    def __init__(self, waiting: int, seconds: int) -> None:
        super().__init__(f"{waiting} requests are waiting already; try again in {seconds} s")
        self.waiting, self.seconds = waiting, seconds


class Pace:
    """How fast the latest requests have finished."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_RECENT)

    def finished(self) -> None:
        self._ends.append(monotonic())

    def seconds(self, count: int) -> int:
        """Whole seconds in which `count` more should finish: between one and a minute."""
        between = 1.0
        if len(self._ends) > 1:
            between = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return min(max(ceil(count * between), 1), 60)


class LoopObserver:
    """Follows requests, on the event loop. The hooks do nothing here."""

    def submitted(self, request: Request) -> None:
        """A request is handed to an engine for the first time."""

    def refused(self) -> None:
        """A submission found the queues full."""

    def rejected(self, request_ids: Iterable[str]) -> None:
        """The engine rejects a submission because of one of its requests."""

    def prefilled(self, seconds: float) -> None:
        """The engine spent this time on prefills apart from rounds."""

    def stepped(self, configuration: Configuration, chunks: Sequence[Chunk]) -> None:
        """A step by this configuration added these chunks to unfinished requests."""

    def dropped(self, request_id: str) -> None:
        """An unfinished request is given up by its caller."""

    def failed(self, request_ids: Iterable[str]) -> None:
        """The requests end because their engine is broken."""


class Submission:
    """Requests in an engine. `configuration` is the engine's; `chunks` receives what each step adds
    to a request, or the reason why the engine is broken.

    Closing it before its requests have finished, or losing it, frees their slots.
    """

    def __init__(self, loop: EngineLoop, requests: Sequence[Request]) -> None:
        self._loop, self.configuration = loop, loop.engine.configuration
        self._ids = [request.id for request in requests]
        self.chunks: asyncio.Queue[Chunk | EngineFailed] = asyncio.Queue()

    def close(self) -> None:
        """Cancel the requests that are not finished; together they count as one."""
        self._loop.cancelled += self._loop.drop(self._ids)

    __del__ = close


class EngineLoop:
    """Steps an engine while it has requests, between `open` and `close`.

    While `queue` requests or more wait for a slot, no more are taken.
    """

    def __init__(self, engine: EngineProcess, queue: int = QUEUE) -> None:
        self.engine, self.queue = engine, queue
        self.observer = LoopObserver()
        self._pace = Pace()
        self.failure: EngineFailed | None = None
        self.cancelled = 0  # submissions given up by their clients
        self._chunks: dict[str, asyncio.Queue[Chunk | EngineFailed]] = {}  # of unfinished requests
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._stepping = False  # whether a step is queued; used by the engine's thread only
        self._prefill_seconds = 0.0  # that were reported to the observer

    def open(self) -> None:
        """Belong to the running event loop."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Take no more steps."""
        self._chunks.clear()
        self._thread.shutdown(cancel_futures=True)

    @property
    def running(self) -> int:
        """Requests that are waiting or being decoded."""
        return len(self._chunks)

    @property
    def waiting(self) -> int:
        """Requests that have no slot."""
        waiting = max(self.running - self.engine.slots, self.engine.status().waiting)
        return min(waiting, self.running)  # the engine's number may include cancelled requests

    @property
    def full(self) -> bool:
        """Whether as many requests wait as may."""
        return self.running - self.engine.slots >= self.queue or 0 < self.queue <= self.waiting

    @property
    def works(self) -> bool:
        """Whether the engine is not broken. Where its process has ended, its requests fail."""
        if not self.failure and not self.engine.alive:
            self._fail("the engine failed: its process has ended")
        return not self.failure

    def submit(self, requests: Sequence[Request], begun: bool = False) -> Submission:
        """Hand all requests to the engine, or none. Requests that were `begun` by another engine do
        not queue again.

        Raises:
            UserError: the engine rejects a request.
            QueueFull: too many are waiting.
            EngineFailed: the engine is broken.
        """
        if not self.works:
            raise EngineFailed(str(self.failure))
        if self.full and not begun:
            waiting = self.waiting
            raise QueueFull(waiting, self._pace.seconds(waiting - self.queue + 1))
        submission = Submission(self, requests)
        try:
            for request in requests:
                self._chunks[request.id] = submission.chunks
                if not begun:
                    self.observer.submitted(request)
                self.engine.add(request)
        except UserError:
            names = [request.id for request in requests]
            self.observer.rejected(names)
            self.drop(names)
            raise
        except RuntimeError as error:  # the process has just ended
            self._fail(f"the engine failed: {error}")
            raise EngineFailed(str(self.failure)) from None
        self._thread.submit(self._begin)
        return submission

    async def between_steps(self, call: Callable[[], T]) -> T:
        """The result of `call`, run on the engine's thread between two steps."""
        return await self._loop.run_in_executor(self._thread, call)

    def drop(self, request_ids: Iterable[str]) -> bool:
        """Take requests out of the engine; whether any of them was unfinished."""
        unfinished = [name for name in request_ids if self._chunks.pop(name, None) is not None]
        for name in unfinished:
            self.observer.dropped(name)
            self.engine.cancel(name)
        return bool(unfinished)

    # On the engine's thread. Steps follow each other without waiting for the event loop.

    def _begin(self) -> None:
        if not self._stepping:
            self._stepping = True
            self._thread.submit(self._step)

    def _step(self) -> None:
        try:
            chunks = self.engine.step()
        except Exception as error:
            logger.exception("the engine failed")
            self._loop.call_soon_threadsafe(self._fail, f"the engine failed: {error!r}")
            return
        self._loop.call_soon_threadsafe(self._deliver, chunks, self.engine.status().read_seconds)
        if self.engine.idle:
            self._stepping = False
        else:
            self._thread.submit(self._step)

    # On the event loop.

    def _deliver(self, chunks: Sequence[Chunk], prefill_seconds: float) -> None:
        # The other chunks are of requests that were cancelled during the step.
        chunks = [chunk for chunk in chunks if chunk.request_id in self._chunks]
        self.observer.prefilled(prefill_seconds - self._prefill_seconds)
        self._prefill_seconds = prefill_seconds
        self.observer.stepped(self.engine.configuration, chunks)
        for chunk in chunks:
            self._chunks[chunk.request_id].put_nowait(chunk)
            if chunk.finished:
                del self._chunks[chunk.request_id]
                self._pace.finished()

    def _fail(self, reason: str) -> None:
        self.failure = EngineFailed(reason)
        for queue in set(self._chunks.values()):
            queue.put_nowait(self.failure)
        self._chunks.clear()
