"""An observer that counts."""

from __future__ import annotations

from specdec_core.base.observer import Observer


class Steps(Observer):
    """How many steps a stage has, and how many were done of them."""

    def __init__(self) -> None:
        self.expected: int | None = None
        self.done = 0

    def stage(self, name: str, steps: int | None = None, done: int = 0) -> None:
        self.expected, self.done = steps, done

    def step(self) -> None:
        self.done += 1
