"""Where the time of another program's steps goes: its own parts and those of a plug-in."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from time import perf_counter

from specdec_core.base.files import write_atomically

VARIABLE = "SPECDEC_STEP_TIMES"
DRAFT_FORWARDS = "draft forwards"


class PluginStepTimes:
    """The means of the parts of steps, as JSON in the file that SPECDEC_STEP_TIMES names; without
    one nothing is written. What comes before a prompt has been read is left out.

    A part ends where :meth:`mark` is called, and begins where the one before it ended. The file is
    written at each prompt, for the process may be killed, and by :meth:`write`.
    """

    def __init__(self, name: str) -> None:
        file = os.environ.get(VARIABLE)
        self._name, self.file = name, Path(file) if file else None
        self._parts: dict[str, float] = defaultdict(float)  # seconds of the step in progress
        self._seconds: dict[str, float] = defaultdict(float)  # of those that count
        self._steps = self._tokens = self._candidates = 0
        self._last = perf_counter()

    def mark(self, part: str) -> None:
        """What was done since the last mark was this."""
        now = perf_counter()
        self._parts[part] += now - self._last
        self._last = now

    def split(self, part: str, of: str, seconds: float) -> None:
        """So many seconds of the part `of` were another one."""
        self._parts[part] += seconds
        self._parts[of] -= seconds

    def step(self, tokens: int, candidates: int, began: bool) -> None:
        """A step has ended: it added `tokens` and proposed `candidates`. With `began` it read
        a prompt."""
        if began:
            self._parts.clear()
            self.write()
            return
        for part, seconds in self._parts.items():
            self._seconds[part] += seconds
        self._parts.clear()
        self._steps += 1
        self._tokens += tokens
        self._candidates += candidates

    def write(self) -> None:
        """Write the means so far."""
        steps = self._steps
        if self.file is None or not steps:
            return
        parts = {part: round(1e3 * s / steps, 4) for part, s in self._seconds.items()}
        content = {
            "configuration": self._name,
            "steps": steps,
            "tokens a step": round(self._tokens / steps, 3),
            "candidates a step": round(self._candidates / steps, 3),
            "milliseconds a step": {"all": round(sum(parts.values()), 4), **parts},
        }
        write_atomically(self.file, json.dumps(content, indent=1) + "\n")
