"""One engine, many asyncio callers: requests share the batch's slots.

All calls into the engine run on one thread, in order, so they fall between steps without a lock
and the event loop stays free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from specdec_core.engine import Chunk, Engine, Request

logger = logging.getLogger(__name__)


class EngineFailed(RuntimeError):
    """A step of the engine raised; its requests are lost and its state is not to be trusted."""


class Submission:
    """Requests in the engine: an asynchronous iterator over (index of the request, chunk) that
    ends with the last request.

    Closing it before the end, or losing it, frees the slots.
    """

    def __init__(self, loop: EngineLoop, requests: Sequence[Request]) -> None:
        self._loop = loop
        self._indices = {request.id: index for index, request in enumerate(requests)}
        self.chunks: asyncio.Queue[Chunk | EngineFailed] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk]]:
        unfinished = len(self._indices)
        while unfinished:
            chunk = await self.chunks.get()
            if isinstance(chunk, EngineFailed):
                raise chunk
            unfinished -= chunk.finished is not None
            yield self._indices[chunk.request_id], chunk

    def close(self) -> None:
        """Cancel what is not finished."""
        for request_id in self._indices:
            self._loop.cancel(request_id)

    __del__ = close


class EngineLoop:
    """Steps an engine while it has requests. Use as `async with EngineLoop(engine) as loop`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: EngineFailed | None = None
        self._chunks: dict[str, asyncio.Queue[Chunk | EngineFailed]] = {}  # of unfinished requests
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="engine",
            # OpenMP counts threads for each thread that starts them.
            initializer=torch.set_num_threads,
            initargs=(engine.pair.spec.runner.threads,),
        )
        self._stepping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EngineLoop:
        self._stepping = asyncio.create_task(self._step())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._stepping is not None
        self._stepping.cancel()
        await asyncio.gather(self._stepping, return_exceptions=True)
        self._chunks.clear()
        self._thread.shutdown(cancel_futures=True)

    @property
    def running(self) -> int:
        """Requests that are waiting or being decoded."""
        return len(self._chunks)

    async def submit(self, requests: Sequence[Request]) -> Submission:
        """Hand all requests to the engine, or none.

        Raises:
            UserError: what the engine finds wrong with a request.
            EngineFailed: the engine is broken.
        """
        if self.failure:
            raise self.failure
        submission = Submission(self, requests)
        try:
            for request in requests:
                self._chunks[request.id] = submission.chunks
                await self._call(self.engine.add, request)
                self._wake.set()
        except BaseException:
            submission.close()
            raise
        return submission

    def cancel(self, request_id: str) -> None:
        """Drop a request; nothing happens for one that is finished."""
        if self._chunks.pop(request_id, None) is not None:
            self._thread.submit(self.engine.cancel, request_id)

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _step(self) -> None:
        while True:
            await self._wake.wait()
            try:
                chunks = await self._call(self.engine.step)
            except Exception as error:
                logger.exception("the engine failed")
                self.failure = EngineFailed(f"the engine failed: {error!r}")
                for queue in set(self._chunks.values()):
                    queue.put_nowait(self.failure)
                self._chunks.clear()
                return
            for chunk in chunks:
                queue = self._chunks.get(chunk.request_id)
                if queue is None:  # cancelled during the step
                    continue
                queue.put_nowait(chunk)
                if chunk.finished:
                    del self._chunks[chunk.request_id]
            if not self._chunks:
                self._wake.clear()
