"""The observer of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specdec_core.base.observer import Observer
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.search.results import SweepResult, Trial


class SweepObserver(Observer):
    """Follows a sweep."""

    def begun(self, result: SweepResult, prompts: Sequence[Prompt], folder: Path) -> None:
        """Counting begins or resumes; `result.trials` are done already."""

    def trial_finished(self, trial: Trial) -> None:
        """A configuration's counts are known; they are not on disk yet."""
