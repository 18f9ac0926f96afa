"""What settings need to know of a recording to say whether they can be replayed from it."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_core.config.sampling import Sampling


@dataclass(frozen=True)
class RecordingFacts:
    """What was recorded. `timed`: there is a profile to compute the rounds' times from."""

    drafts: tuple[str, ...]
    sampling: Sampling
    max_draft: int  # the longest chain that was recorded
    max_new_tokens: int
    timed: bool = False
    eagle_heads: tuple[str, ...] = ()  # the drafts that are EAGLE heads
