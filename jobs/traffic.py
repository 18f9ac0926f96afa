"""Logging what a server does to MLflow, beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from specdec_core.base.errors import UserError

if TYPE_CHECKING:
    from cluster.serving.control import RunningServer

LOOK = 5.0  # seconds between looks for events


class _Tracking(threading.Thread):
    """Reads the server's counts, which waits for nobody, and hands them to the run."""

    def __init__(self, server: RunningServer, every: float, warn: Callable[[str], None]) -> None:
        super().__init__(daemon=True)
        self.server, self.every, self.warn = server, every, warn
        self.over = threading.Event()

    def run(self) -> None:
        try:
            self._track()
        except UserError as error:
            self.warn(f"the traffic is not logged: {error}")

    def _track(self) -> None:
        # MLflow takes seconds to import.
        from cluster.serving.traffic import Events, between, read
        from dashboards.tracking.traffic_run import TrafficRun

        first = last = read(self.server)
        health = first.health
        named = ("configuration", "label", "source", "version", "slots", "queue", "max_length")
        params = {"served." + name: health[name] for name in named}
        name = f"{self.server.url.split('//')[-1]} {int(first.time)}"
        run = TrafficRun(self.server.name, name, {**params, "seconds_a_step": self.every})
        events, step, due, away = Events(health), 0, monotonic() + self.every, False
        while True:
            over = self.over.wait(min(LOOK, max(due - monotonic(), 0.0)))
            try:
                now = read(self.server)
            except UserError:  # it starts a replica again, or ends
                now = None
            if now is not None:
                for event in events.since(now.health):
                    run.event(event)
                if over or monotonic() >= due:
                    run.log(between(last, now), step)
                    last, step, due = now, step + 1, monotonic() + self.every
            trouble = run.delivery.trouble if run.delivery else None
            if bool(trouble) != away:
                away = bool(trouble)
                self.warn(
                    f"MLflow cannot be reached; the traffic is logged later ({trouble})"
                    if away
                    else "MLflow is back, and gets what it missed"
                )
            if over:
                break
        if (left := run.end()) is not None:
            self.warn(f"the traffic is not logged to its end: {left}")


@contextmanager
def tracked(server: RunningServer, every: float, warn: Callable[[str], None]) -> Iterator[None]:
    """Log the traffic of `server` during the block, a point for each `every` seconds; `warn` is
    told what is wrong with that."""
    tracking = _Tracking(server, every, warn)
    tracking.start()
    try:
        yield
    finally:
        tracking.over.set()
        tracking.join(timeout=30)
