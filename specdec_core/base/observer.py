"""Observers of long work: they are called with its progress."""

from __future__ import annotations


class Observer:
    """Follows long work. The hooks do nothing here; subclasses override those that they need, and
    some kinds of work have further hooks."""

    def stage(self, name: str, steps: int | None = None, done: int = 0) -> None:
        """A stage begins, with `done` of its `steps` done; None if steps are not counted."""

    def step(self) -> None:
        """A step of the stage is done."""

    def recorded(self, prompts: int, tokens: int) -> None:
        """Another `prompts` prompts are on disk, with `tokens` tokens of the target's output."""

    def warned(self, message: str) -> None:
        """Something is wrong that does not stop the work."""


SILENT = Observer()  # follows work that nothing looks at
