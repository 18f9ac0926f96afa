"""Trials that do nothing, to measure how many of them a driver keeps up with.

They take the way of real ones (Tune, the sweep's folder, MLflow) and write as much, but load no
model: their processes are small and start quickly.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import pandas as pd
from ray import tune

from specdec_core.search.round_tables import RoundTable

PROMPTS = 48
ROUNDS = 20  # a prompt

_COUNTS = {
    "requests": PROMPTS,
    "n": 64 * PROMPTS,
    "n_draft": 60 * PROMPTS,
    "n_target": ROUNDS * PROMPTS,
    "n_discarded": 16 * PROMPTS,
    "n_drafted": 60 * PROMPTS,
    "n_accepted": 44 * PROMPTS,
    "n_target_tokens": ROUNDS * PROMPTS,
    "n_draft_tokens": 60 * PROMPTS,
}
_METRICS = ("verification_rate", "discard_rate", "mat", "acceptance_rate", "estimated_speedup")


@dataclass(frozen=True)
class IdleTask:
    """The part of a task that :func:`cluster.sweep.counting.count_all` uses, and a trial's time."""

    seconds: float
    requests: range = range(PROMPTS)
    chunk: int = PROMPTS
    replay: None = None

    def replays(self, configuration: object) -> bool:
        return False


class IdleTrial(tune.Trainable):
    """Sleeps for each configuration, and answers as :class:`cluster.sweep.trial.CountTrial`."""

    def setup(self, config: dict[str, Any], task: IdleTask | None = None) -> None:
        assert task is not None
        self.task = task
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.configurations = json.loads(new_config["configurations"])
        return True

    def step(self) -> dict[str, Any]:
        configuration = self.configurations.pop()
        time.sleep(self.task.seconds)
        metrics = {name: 1.0 for name in _METRICS}
        trial = {"configuration": configuration, "counts": _COUNTS, "metrics": metrics}
        rows = range(PROMPTS * ROUNDS)
        rounds = pd.DataFrame(
            {
                "config_id": "idle",
                "request_id": [f"prompt/{row // ROUNDS}" for row in rows],
                "round": [row % ROUNDS for row in rows],
                **{name: [row % 7 for row in rows] for name in _COUNTS},
            }
        )
        return {
            "estimated_speedup": 1.0,
            "prompts": PROMPTS,
            "trials": json.dumps([trial]),
            "failed": [],
            "done": not self.configurations,
            "rounds": RoundTable.of(rounds),
        }
