"""What an observer of a recording hears."""

from __future__ import annotations

from specdec_core.base.observer import Observer


class RecordingObserver(Observer):
    """Follows a recording."""

    def recorded(self, prompts: int, tokens: int) -> None:
        """So many more prompts are on disk, with the `tokens` that the target wrote for them."""
