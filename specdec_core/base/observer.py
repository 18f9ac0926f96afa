"""Observers of long work: they are called with its progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar


class Observer:
    """Follows long work. The hooks do nothing here; subclasses override those that they need, and
    some kinds of work have further hooks."""

    def stage(self, name: str, steps: int | None = None, done: int = 0) -> None:
        """A stage begins, with `done` of its `steps` done; None if steps are not counted."""

    def step(self) -> None:
        """A step of the stage is done."""

    def warned(self, message: str) -> None:
        """Something is wrong that does not stop the work."""


AnyObserver = TypeVar("AnyObserver", bound=Observer)


def together(kind: type[AnyObserver], members: Sequence[AnyObserver]) -> AnyObserver:
    """An observer of a kind that passes each call of a hook to all `members`, in order."""

    def passed_on(hook: str) -> Callable[..., None]:
        def call(_: AnyObserver, *args: Any, **kwargs: Any) -> None:
            for member in members:
                getattr(member, hook)(*args, **kwargs)

        return call

    hooks = {name: passed_on(name) for name in dir(kind) if not name.startswith("_")}
    combined: type[AnyObserver] = type(f"Together{kind.__name__}", (kind,), hooks)
    return combined()
