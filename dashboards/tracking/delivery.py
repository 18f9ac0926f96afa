"""Logging to MLflow beside the work that is logged: no slow or absent store holds that up."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from dashboards.store import unreachable

Job = Callable[[], object]

RETRY_SECONDS = 2.0


class Delivery:
    """Jobs that each log something, done by threads of their own, at first one.

    What the store could not take is kept and tried again, so a job must be one that may be done
    twice. Any other error comes out of :meth:`settle`.
    """

    def __init__(self) -> None:
        self.done = 0
        self.trouble: str | None = None  # why the store took nothing at the last try
        self._jobs: deque[Job] = deque()
        self._under_way = 0
        self._error: Exception | None = None
        self._state = threading.Condition()
        self._open, self._running = True, True
        self.employ(1)

    def employ(self, more: int) -> None:
        """From now on so many more jobs may be under way at a time."""
        for _ in range(more):
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
        """Wait until every job is done, or for `patience` seconds in which none was, or `at_most`
        seconds in all; returns how many are left. `step` is called for each that is done.
        Afterwards nothing is delivered until :meth:`settle` is called again."""
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
        """Forget what is waiting."""
        with self._state:
            self._jobs.clear()

    def close(self) -> None:
        """Let the threads end; what is not done stays undone."""
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
                    trouble = str(raised).strip().splitlines()[0]
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
