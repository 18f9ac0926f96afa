"""What the stages of a sweep share."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_core.search.folder import SweepFolder
from specdec_core.search.observer import SweepObserver
from specdec_core.search.plan import ResolvedPlan
from specdec_core.search.results import SweepResult, Trial


@dataclass
class SweepState:
    """A plan, its result so far, the folder that keeps it, and what is told of it."""

    plan: ResolvedPlan
    result: SweepResult
    folder: SweepFolder
    observer: SweepObserver

    def add(self, trial: Trial, rounds: bytes | None) -> None:
        """Add a trial to the result and the folder. `rounds` are its rounds as a Parquet file,
        where it was decoded."""
        self.observer.trial_finished(trial)
        self.folder.add_trial(trial, rounds)
        self.result.trials.append(trial)
