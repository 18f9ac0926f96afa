"""A trained model on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

C = TypeVar("C", covariant=True)


@dataclass(frozen=True)
class Finished(Generic[C]):
    """A trained model, its folder and its card. The label is its name; in a search over learning
    rates it has the rate."""

    label: str
    folder: Path
    card: C
