"""The observer of a recording."""

from __future__ import annotations

from specdec_core.base.observer import Observer


class RecordingObserver(Observer):
    """Follows a recording."""

    def recorded(self, prompts: int, tokens: int) -> None:
        """Another `prompts` prompts are on disk, with `tokens` tokens of the target's output."""
