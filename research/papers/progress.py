"""The progress of the papers' tables on the console."""

from __future__ import annotations

from dashboards.progress import ConsoleProgress
from specdec_core.recordings.observer import RecordingObserver


class PapersProgress(ConsoleProgress, RecordingObserver):
    """The papers' tables, and the recordings for the page."""

    def recorded(self, prompts: int, tokens: int) -> None:
        self._advance(prompts)
