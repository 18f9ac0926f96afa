"""Measuring again what the loss of a process has disturbed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from specdec_core.base.observer import Observer
from specdec_core.models.runner import CacheLost

ATTEMPTS = 3

Found = TypeVar("Found")


def again_if_lost(measure: Callable[[], Found], observer: Observer) -> Found:
    """What `measure` returns. If it raises :class:`CacheLost`, it is called again, with a warning,
    :data:`ATTEMPTS` times in all."""
    for _ in range(ATTEMPTS - 1):
        try:
            return measure()
        except CacheLost as error:
            observer.warned(f"{error}; what it disturbed is measured again")
    return measure()
