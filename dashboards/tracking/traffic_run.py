"""The traffic of a server as a run, written while it serves."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from mlflow.entities import Metric, RunTag
from mlflow.exceptions import MlflowException

from dashboards.store import run_tags
from dashboards.tracking.delivered_run import LEAVING, DeliveredRun
from specdec_core.base.environment import environment

EVENTS = "events.jsonl"  # artifact with all of them
_TAGS = 5  # tags of a run hold the latest events


class TrafficRun(DeliveredRun):
    """A run of the pair's experiment for one server, from its start to its end.

    Nothing here waits for the store. Entries that it does not take at once are delivered later, in
    order.
    """

    key = "traffic"

    def __init__(self, pair: str, server: str, params: Mapping[str, Any]) -> None:
        """`server` identifies one run of a server; `params` say what it serves, and how."""
        super().__init__()
        self.events: list[dict[str, str]] = []
        tags = run_tags("serve", environment())
        self._start(pair, (self.key, server), f"traffic {server}", tags, dict(params))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log what was measured up to now."""
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._put(lambda: self._client.log_batch(self.run_id, metrics=metrics))

    def event(self, what: str) -> None:
        """Log that something happened now."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.events.append({"time": moment, "event": what})
        self._put(partial(self._log_events, list(self.events)))

    def end(self) -> str | None:
        """End the run; returns why the store did not take everything, if it did not."""
        self._put(lambda: self._end(self.run_id, "FINISHED"))
        self.finished = True
        assert self.delivery is not None
        try:
            left = self.delivery.settle(LEAVING, 2 * LEAVING)
        except MlflowException as error:  # the run was deleted, for instance
            return str(error).strip().splitlines()[0]
        return self._absent(left) if left else None

    def _log_events(self, events: list[dict[str, str]]) -> None:
        latest = enumerate(reversed(events[-_TAGS:]), start=1)
        tags = [RunTag(f"event.{n}", f"{e['time']} {e['event']}"[:5000]) for n, e in latest]
        self._client.log_batch(self.run_id, tags=tags)
        lines = "".join(json.dumps(event) + "\n" for event in events)
        self._client.log_text(self.run_id, lines, EVENTS)
