"""An observer that keeps what it hears, for tests of long work."""

from specdec_core.base.observer import Observer


class Heard(Observer):
    """`done` is what the last stage began with."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.warnings: list[str] = []
        self.steps = self.done = 0

    def stage(self, name: str, steps: int | None = None, done: int = 0) -> None:
        self.stages.append(name)
        self.done = done

    def step(self) -> None:
        self.steps += 1

    def warned(self, message: str) -> None:
        self.warnings.append(message)
