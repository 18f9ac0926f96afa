"""Let all processes of a sweep start before the first trial ends.

Tune gives a trial whose process is still starting to the first process that gets free, and kills
the one that was starting. Where trials are shorter than the start of a process, a cluster would
never fill up. So each process first gets a trial without configurations, which ends when all
processes have started, or no more have for a while.
"""

from __future__ import annotations

import time
from typing import Any

from ray import tune

NOTHING = "[]"  # `config["configurations"]` of a trial that only starts its process
LOOK = 0.5  # seconds between two looks whether the others have started
PATIENCE = 10.0  # seconds without another start after which the processes begin

_STARTED = "started"


def started(metric: str, progress: str) -> dict[str, Any]:
    """The result of a trial without configurations, which runs until it is stopped."""
    time.sleep(LOOK)
    return {metric: 0.0, progress: 0, "trials": NOTHING, "done": False, _STARTED: True}


class Gathering(tune.Stopper):
    """Ends the trials without configurations once `processes` processes have started."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.trials: set[str] = set()
        self.latest = time.monotonic()  # start of a process

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        if _STARTED not in result:
            return False
        if trial_id not in self.trials:
            self.trials.add(trial_id)
            self.latest = time.monotonic()
        return len(self.trials) >= self.processes or time.monotonic() - self.latest > PATIENCE

    def stop_all(self) -> bool:
        return False
