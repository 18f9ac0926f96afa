"""What settings have to know of a recording to say whether it tells what they would do."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_core.config.sampling import Sampling


@dataclass(frozen=True)
class RecordingFacts:
    """What was recorded. `timed`: a profile says how long its rounds would take."""

    drafts: tuple[str, ...]
    sampling: Sampling
    max_draft: int  # the longest chain that was recorded
    max_new_tokens: int
    timed: bool = False
