"""Whether the traffic has changed: how much of the drafts is accepted, and how long prompts are."""

from __future__ import annotations

import time
from collections import deque
from math import log2

from cluster.serving.protocol.models import DriftAlarm
from specdec_core.config import Configuration
from specdec_core.search.change import ChangeDetector
from specdec_core.tokens.statistics import Generation

# Of each signal a false alarm comes within n requests with probability n / BETWEEN at the most.
BETWEEN = 100_000
KEPT = 20  # alarms that are remembered
_LONGEST = 20.0  # log₂ of the longest prompt that is told from longer ones


class Drift:
    """Looks at the requests that have ended. Acceptance is the configuration's, so that another one
    begins anew."""

    def __init__(self, between: float = BETWEEN) -> None:
        self.detectors = {
            "acceptance": ChangeDetector(0.0, 1.0, between, seed=1),
            "prompt_tokens": ChangeDetector(0.0, _LONGEST, between, seed=2),
        }
        self.counts = dict.fromkeys(self.detectors, 0)
        self.alarms: deque[DriftAlarm] = deque(maxlen=KEPT)
        self._configuration: Configuration | None = None

    def finished(self, configuration: Configuration, generation: Generation, prompt: int) -> None:
        """A request with so many prompt tokens has ended."""
        if configuration != self._configuration:
            self._configuration = configuration
            self.detectors["acceptance"].begin()
        drafted = sum(one.drafted for one in generation.rounds)
        if drafted:
            accepted = sum(one.accepted for one in generation.rounds)
            self._add("acceptance", accepted / drafted)
        self._add("prompt_tokens", log2(max(prompt, 1)))

    def _add(self, signal: str, value: float) -> None:
        change = self.detectors[signal].add(value)
        if change is None:
            return
        before, after = change.before, change.after
        if signal == "prompt_tokens":
            before, after = 2**before, 2**after
        self.counts[signal] += 1
        self.alarms.append(
            DriftAlarm(
                signal=signal,
                time=int(time.time()),
                requests=change.count,
                before=before,
                after=after,
            )
        )
