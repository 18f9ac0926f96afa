"""Let all processes of a sweep start before the first trial ends.

Tune gives a trial whose process is still starting to the first process that gets free, and kills
the one that was starting. Where trials take less time than processes take to start, a cluster
would never fill up. So each process first gets a trial of no configuration, which ends when all
processes are there, or no more have come for a while.
"""

from __future__ import annotations

import time
from typing import Any

from ray import tune

NOTHING = "[]"  # `config["configurations"]` of a trial that only starts its process
LOOK = 0.5  # seconds between two looks whether the others are there
PATIENCE = 10.0  # seconds without another process after which those that are there begin

_STARTED = "started"


def started(metric: str, progress: str) -> dict[str, Any]:
    """What a trial of no configuration answers; it goes on until it is stopped."""
    time.sleep(LOOK)
    return {metric: 0.0, progress: 0, "trials": NOTHING, "done": False, _STARTED: True}


class Gathering(tune.Stopper):
    """Ends the trials of no configuration once `wanted` processes are there."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.there: set[str] = set()
        self.came = time.monotonic()  # the last one

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        if _STARTED not in result:
            return False
        if trial_id not in self.there:
            self.there.add(trial_id)
            self.came = time.monotonic()
        return len(self.there) >= self.wanted or time.monotonic() - self.came > PATIENCE

    def stop_all(self) -> bool:
        return False
