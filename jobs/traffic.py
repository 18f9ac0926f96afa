"""What is done beside a server while it serves: its traffic is logged to MLflow, and a command is
started when the traffic has changed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import mean
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from specdec_core.base.errors import UserError
from specdec_core.base.uris import without_passwords

if TYPE_CHECKING:
    from cluster.serving.control import RunningServer
    from dashboards.tracking.server_runs import TrafficRun

LOOK = 5.0  # seconds between looks for alarms
SIGNAL = "SPECDEC_DRIFT"  # in the environment of the command: what has changed
_SERVED = ("configuration", "label", "source", "version", "slots", "queue", "max_length")


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


def totals(page: str) -> defaultdict[str, float]:
    """Each metric on a page in Prometheus' format by its name without its prefix: its sum over its
    labels, for a share (`…_perc`) the mean; by its signal for what has one. Without a prefix are
    metrics of libraries, as those of Python's memory, which are left out."""
    found = defaultdict[str, list[float]](list)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.partition(":")[2]
            if name and "le" not in sample.labels:
                signal = sample.labels.get("signal")
                found[name + (f".{signal}" if signal else "")].append(sample.value)
    return defaultdict(
        float, ((n, (mean if n.endswith("_perc") else sum)(each)) for n, each in found.items())
    )


def between(before: str, after: str, seconds: float) -> dict[str, float]:
    """What two pages of metrics say of the `seconds` between them: counters as their growth a
    second, histograms as the mean of their observations, the values of gauges; the accepted
    length (`mat`), and the accepted share of the candidates (`acceptance`)."""
    old, new = totals(before), totals(after)
    # A counter that has shrunk was reset.
    grown = defaultdict(float, ((n, v - old[n] if v >= old[n] else v) for n, v in new.items()))
    values: dict[str, float] = {}
    for name, now in new.items():
        metric, dot, signal = name.partition(".")
        kind = metric.rpartition("_")[2]
        stem = metric.removesuffix(f"_{kind}")
        if kind == "total":
            values[f"{stem}_per_second{dot}{signal}"] = grown[name] / seconds
        elif kind == "sum" and grown[f"{stem}_count"]:
            values[f"{stem}.mean"] = grown[name] / grown[f"{stem}_count"]
        elif kind not in ("sum", "count", "created", "info"):
            values[name] = now
    if rounds := grown["rounds_total"]:
        values["mat"] = grown["generation_tokens_total"] / rounds
    if candidates := grown["spec_decode_num_draft_tokens_total"]:
        values["acceptance"] = grown["spec_decode_num_accepted_tokens_total"] / candidates
    return values


class _Watching(threading.Thread):
    """Reads the server's metrics; no request waits for that."""

    def __init__(self, server: RunningServer, watch: Watch, warn: Callable[[str], None]) -> None:
        super().__init__(daemon=True)
        self.server, self.watch, self._warn = server, watch, warn
        self.over = threading.Event()
        self._undelivered = False
        self._command: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        try:
            self._watch()
        except UserError as error:
            self._warn(f"the traffic is not watched: {error}")

    def _watch(self) -> None:
        health, page, last = self.server.health(), self.server.metrics(), monotonic()
        alarms, run, step = health.get("drift", []), None, 0
        if self.watch.track:
            run = self._traffic_run(health)
        over = False
        while not over:
            over = self.over.wait(min(LOOK, max(last + self.watch.every - monotonic(), 0.0)))
            try:
                alarms = self._new_alarms(alarms)
                if not over and monotonic() < last + self.watch.every:
                    continue
                before, began = page, last
                page, last = self.server.metrics(), monotonic()
            except UserError:  # it starts a replica again, or ends
                over = over or self.over.wait(LOOK)
                continue
            if run is not None:
                values = between(before, page, max(last - began, 1e-9))
                self._deliver(partial(run.log, values, step))
                step += 1
        if run is not None:
            self._deliver(run.end)

    def _traffic_run(self, health: Mapping[str, Any]) -> TrafficRun:
        from dashboards.tracking.server_runs import TrafficRun  # it imports MLflow

        params = {f"served.{name}": health[name] for name in _SERVED}
        server = f"{self.server.url.split('//')[-1]} {int(time())}"
        return TrafficRun(self.server.name, server, {**params, "seconds_a_step": self.watch.every})

    def _deliver(self, write: Callable[[], None]) -> None:
        """Write to the store. Say once that it cannot be used, and once that it can again."""
        from mlflow.exceptions import MlflowException  # MLflow takes seconds to import

        try:
            write()
        except (UserError, MlflowException) as error:
            if not self._undelivered:
                self._warn(without_passwords(str(error).partition("\n")[0]))
            self._undelivered = True
        else:
            if self._undelivered:
                self._warn("MLflow is back, and has what it missed")
            self._undelivered = False

    def _new_alarms(self, known: list[Any]) -> list[Any]:
        """Start the command if there is an alarm that is not `known`, unless the command still
        runs; returns the present alarms."""
        alarms: list[Any] = self.server.health().get("drift", [])
        new = [alarm["signal"] for alarm in alarms if alarm not in known]
        running = self._command is not None and self._command.poll() is None
        if not new or not self.watch.on_drift or running:
            return alarms
        self._warn(f"the traffic has changed ({new[-1]}): {shlex.join(self.watch.on_drift)}")
        try:
            self._command = subprocess.Popen(
                self.watch.on_drift,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {SIGNAL: new[-1]},
                start_new_session=True,  # it continues when the server ends
            )
        except OSError as error:
            self._warn(f"--on-drift: {error.strerror or error}")
        return alarms


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
