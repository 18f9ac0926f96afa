"""A trained head of a grid, and the observer of the grid's training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specdec_core.base.observer import Observer
from specdec_core.drafting.heads.card import HeadCard


@dataclass(frozen=True)
class FinishedHead:
    """A trained head, its folder and its card. The label is its name, in a search with the
    learning rate."""

    label: str
    folder: Path
    card: HeadCard


class HeadObserver(Observer):
    """Follows the training of a grid."""

    def head_finished(self, head: FinishedHead) -> None:
        """A head is trained and on disk, now or earlier."""
