"""What is done beside a server while it serves: its traffic is logged to MLflow, and a command is
started when that has changed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from specdec_core.base.errors import UserError

if TYPE_CHECKING:
    from cluster.serving.control import RunningServer
    from cluster.serving.traffic import Events, Reading
    from dashboards.tracking.traffic_run import TrafficRun

LOOK = 5.0  # seconds between looks for events
SIGNAL = "SPECDEC_DRIFT"  # in the environment of the command: what has changed


@dataclass(frozen=True)
class Watch:
    """Log a point for each `every` seconds, if `track`; start `on_drift` where the traffic has
    changed."""

    track: bool = True
    every: float = 60.0
    on_drift: tuple[str, ...] = ()


def read_command(text: str | None) -> tuple[str, ...]:
    """The words of `--on-drift`. Raises :class:`UserError` for no program."""
    if text is None:
        return ()
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"--on-drift {text}: {str(error).lower()}") from None
    if not words or shutil.which(words[0]) is None:
        raise UserError(f"--on-drift {text}: no such program; expected a command")
    return words


class _Watching(threading.Thread):
    """Reads the server's metrics; no request waits for that."""

    def __init__(self, server: RunningServer, watch: Watch, warn: Callable[[str], None]) -> None:
        super().__init__(daemon=True)
        self.server, self.watch, self.warn = server, watch, warn
        self.over = threading.Event()
        self._logged: TrafficRun | None = None
        self._away = False
        self._command: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        try:
            self._watch()
        except UserError as error:
            self.warn(f"the traffic is not logged: {error}")

    def _watch(self) -> None:
        from cluster.serving.traffic import Events, between, read

        last = read(self.server)
        events, step, due = Events(last.health), 0, monotonic() + self.watch.every
        if self.watch.track:
            self._logged = self._begun(last)
        while True:
            over = self.over.wait(min(LOOK, max(due - monotonic(), 0.0)))
            try:
                now = read(self.server)
            except UserError:  # it starts a replica again, or ends
                now = None
            if now is not None:
                self._heard(events, now)
                if self._logged is not None and (over or monotonic() >= due):
                    self._logged.log(between(last, now), step)
                    last, step = now, step + 1
            if monotonic() >= due:
                due = monotonic() + self.watch.every
            self._say_trouble()
            if over:
                break
        if self._logged is not None and (left := self._logged.end()) is not None:
            self.warn(f"the traffic is not logged to its end: {left}")

    def _begun(self, first: Reading) -> TrafficRun:
        from dashboards.tracking.traffic_run import TrafficRun  # MLflow takes seconds to import

        named = ("configuration", "label", "source", "version", "slots", "queue", "max_length")
        params = {f"served.{name}": first.health[name] for name in named}
        name = f"{self.server.url.split('//')[-1]} {int(first.time)}"
        return TrafficRun(self.server.name, name, {**params, "seconds_a_step": self.watch.every})

    def _heard(self, events: Events, now: Reading) -> None:
        events.drifted = None
        for event in events.since(now.health):
            if self._logged is not None:
                self._logged.event(event)
        if events.drifted is not None and self.watch.on_drift:
            self._start(events.drifted)

    def _start(self, signal: str) -> None:
        """Start the command, unless it still runs."""
        if self._command is not None and self._command.poll() is None:
            return
        self.warn(f"the traffic has changed ({signal}): {shlex.join(self.watch.on_drift)}")
        try:
            self._command = subprocess.Popen(
                self.watch.on_drift,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {SIGNAL: signal},
                start_new_session=True,  # it continues when the server ends
            )
        except OSError as error:
            self.warn(f"--on-drift: {error.strerror or error}")
            return
        if self._logged is not None:
            self._logged.event(f"started {self.watch.on_drift[0]} as the traffic has changed")

    def _say_trouble(self) -> None:
        """Say once that the store is away, and once that it is back."""
        if self._logged is None or self._logged.delivery is None:
            return
        trouble = self._logged.delivery.trouble
        if bool(trouble) == self._away:
            return
        self._away = bool(trouble)
        self.warn(
            f"MLflow cannot be reached; the traffic is logged later ({trouble})"
            if trouble
            else "MLflow is back, and gets what it missed"
        )


@contextmanager
def watched(server: RunningServer, watch: Watch, warn: Callable[[str], None]) -> Iterator[None]:
    """Watch `server` during the block; `warn` gets messages."""
    watching = _Watching(server, watch, warn)
    watching.start()
    try:
        yield
    finally:
        watching.over.set()
        watching.join(timeout=10)  # a supervisor does not wait for a store that is away
