"""An observer that keeps what it hears, for tests of long work."""

from specdec_core.base.observer import Observer
from specdec_core.search.observer import SweepObserver
from specdec_core.search.results import Trial


class Heard(Observer):
    """`done` is what the last stage began with, `prompts` and `tokens` what was recorded."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.warnings: list[str] = []
        self.steps = self.done = self.prompts = self.tokens = 0

    def stage(self, name: str, steps: int | None = None, done: int = 0) -> None:
        self.stages.append(name)
        self.done = done

    def step(self) -> None:
        self.steps += 1

    def recorded(self, prompts: int, tokens: int) -> None:
        self.prompts += prompts
        self.tokens += tokens

    def warned(self, message: str) -> None:
        self.warnings.append(message)


class HeardSweep(Heard, SweepObserver):
    """`finished` are the ids of the trials that were timed or counted."""

    def __init__(self) -> None:
        super().__init__()
        self.finished: list[str] = []

    def trial_finished(self, trial: Trial) -> None:
        self.finished.append(trial.id)
