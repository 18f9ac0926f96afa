"""Who wants to know how a sweep goes: MLflow, the console."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.search.results import SweepResult, Trial


class Observer:
    """Hears how a sweep goes. Every hook does nothing here."""

    def stage(self, name: str, steps: int | None = None, done: int = 0) -> None:
        """A stage begins, with `done` of its `steps` behind it; None when they are not counted."""

    def step(self) -> None:
        """A step of the stage is done."""

    def begun(self, result: SweepResult, prompts: Sequence[Prompt], folder: Path) -> None:
        """Counting is about to begin, or to go on: `result.trials` are done already."""

    def trial_finished(self, trial: Trial) -> None:
        """A configuration's counts are known; they are not on disk yet."""

    def counted(self, result: SweepResult) -> None:
        """All configurations are counted, and none was timed yet."""

    def warned(self, message: str) -> None:
        """Something is wrong that does not stop the sweep."""


class RecordingObserver(Observer):
    """Hears how a recording goes."""

    def recorded(self, prompts: int, tokens: int) -> None:
        """Some more prompts are on disk, with what the target wrote after them."""


@dataclass(frozen=True)
class Observers(Observer):
    """Several observers as one."""

    members: Sequence[Observer]

    def stage(self, name: str, steps: int | None = None, done: int = 0) -> None:
        for member in self.members:
            member.stage(name, steps, done)

    def step(self) -> None:
        for member in self.members:
            member.step()

    def begun(self, result: SweepResult, prompts: Sequence[Prompt], folder: Path) -> None:
        for member in self.members:
            member.begun(result, prompts, folder)

    def trial_finished(self, trial: Trial) -> None:
        for member in self.members:
            member.trial_finished(trial)

    def counted(self, result: SweepResult) -> None:
        for member in self.members:
            member.counted(result)

    def warned(self, message: str) -> None:
        for member in self.members:
            member.warned(message)
