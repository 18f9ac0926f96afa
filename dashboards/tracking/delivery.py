"""Logging to MLflow in the background: a slow or unreachable store does not delay the work."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from dashboards.store import unreachable
from specdec_core.base.uris import without_passwords

Job = Callable[[], object]

RETRY_SECONDS = 2.0


class Delivery:
    """A queue of logging jobs and the threads that do them, at first one.

    A job that failed because the store could not be reached is repeated, so it must be safe to do
    twice. Any other error is raised by :meth:`settle`.
    """

    def __init__(self) -> None:
        self.done = 0
        self.trouble: str | None = None  # why the store took nothing at the last try
        self._jobs: deque[Job] = deque()
        self._under_way = 0
        self._error: Exception | None = None
        self._state = threading.Condition()
        self._open, self._running = True, True
        self.add_threads(1)

    def add_threads(self, count: int) -> None:
        for _ in range(count):
            threading.Thread(target=self._work, daemon=True).start()

    @property
    def left(self) -> int:
        """Jobs that are not done."""
        with self._state:
            return len(self._jobs) + self._under_way

    def put(self, job: Job) -> None:
        with self._state:
            self._jobs.append(job)
            self._state.notify()

    def settle(
        self,
        patience: float,
        at_most: float = math.inf,
        step: Callable[[], None] = lambda: None,
    ) -> int:
        """Wait until every job is done, at most `patience` seconds without progress and `at_most`
        seconds in all. Calls `step` for each job done; returns how many are left.
        Nothing more is delivered until the next call."""
        begun = last = time.monotonic()
        with self._state:
            self._running = True
            self._state.notify_all()
            before = self.done
            while (self._jobs or self._under_way) and self._error is None:
                self._state.wait(0.2)
                for _ in range(self.done - before):
                    last = time.monotonic()
                    step()
                before = self.done
                now = time.monotonic()
                if now - last > patience or now - begun > at_most:
                    break
            self._running = False
            if self._error is not None:
                error, self._error = self._error, None
                raise error
        return self.left

    def drop(self) -> None:
        """Drop the jobs that wait."""
        with self._state:
            self._jobs.clear()

    def close(self) -> None:
        """End the threads; jobs that are left are not done."""
        with self._state:
            self._open = False
            self._state.notify_all()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            trouble = error = None
            try:
                job()
            except Exception as raised:
                if unreachable(raised):
                    trouble = without_passwords(str(raised).strip().splitlines()[0])
                else:
                    error = raised
            with self._state:
                self.trouble, self._error = trouble, self._error or error
                self._under_way -= 1
                self.done += not trouble
                if trouble:
                    self._jobs.appendleft(job)
                self._state.notify_all()

    def _next(self) -> Job | None:
        with self._state:
            if self.trouble:
                self._state.wait_for(lambda: not self._open, RETRY_SECONDS)
            self._state.wait_for(lambda: not self._open or (self._running and self._jobs))
            if not self._open:
                return None
            self._under_way += 1
            return self._jobs.popleft()
