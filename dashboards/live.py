"""A running sweep as a page sees it: what is done, what is known, and what is left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from dashboards.look import style
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.search.observer import SweepObserver
from specdec_core.search.results import METRIC, SweepResult, Trial

RATES = ("discard_rate", "verification_rate", "mat", METRIC)


class LiveSweep(SweepObserver):
    """Follows a sweep on the thread that runs it; :meth:`state` may be asked by another one."""

    def __init__(self) -> None:
        self._began = self._stage_began = monotonic()
        self._stage, self._steps, self._done = "starting", 0, 0
        self._resumed = 0  # of the stage's steps, those done before
        self._result: SweepResult | None = None
        self._prompts = 0
        self._trials: list[Trial] = []
        self._warnings: list[str] = []

    def begun(self, result: SweepResult, prompts: Sequence[Prompt], folder: Path) -> None:
        self._result, self._prompts = result, len(prompts)
        self._trials += result.trials

    def stage(self, name: str, steps: int | None = None, done: int = 0) -> None:
        self._stage, self._steps, self._done, self._resumed = name, steps or 0, done, done
        self._stage_began = monotonic()

    def step(self) -> None:
        self._done += 1

    def warned(self, message: str) -> None:
        self._warnings.append(message)

    def trial_finished(self, trial: Trial) -> None:
        self._trials.append(trial)

    def state(self, known: int = 0) -> dict[str, Any]:
        """What there is to show; of trials those after the first `known`. Times are seconds."""
        result, done = self._result, self._done - self._resumed
        spent = monotonic() - self._stage_began
        left = spent / done * (self._steps - self._done) if done and self._steps else None
        timings = [] if result is None else result.timings
        return {
            "name": None if result is None else result.name,
            "prompts": self._prompts,
            "stage": self._stage,
            "steps": self._steps,
            "done": self._done,
            "seconds": monotonic() - self._began,
            "left": left,
            "trials": [_trial(trial) for trial in self._trials[known:]],
            "timings": [
                {"id": t.config_id, "speedup": t.speedup, "low": t.low, "high": t.high}
                for t in timings
            ],
            "champion": None if result is None else result.champion,
            "warnings": self._warnings,
        }


def _trial(trial: Trial) -> dict[str, Any]:
    look = style(trial.configuration.family)
    return {
        "id": trial.id,
        "label": trial.configuration.label,
        "family": look.name,
        "colour": look.colour,
        "lossless": trial.configuration.lossless,
        **{rate: trial.metrics[rate] for rate in RATES},
    }
