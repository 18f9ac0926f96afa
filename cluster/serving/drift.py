"""Detects changes of the traffic: of the accepted share of candidates, and of prompt lengths.

Requests of one conversation are alike, so requests that follow each other are no fair sample. The
means over ten minutes are compared, which outlast most conversations.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from math import log2

from cluster.serving.protocol.models import DriftAlarm
from specdec_core.config import Configuration
from specdec_core.search.change import Change, ChangeDetector
from specdec_core.tokens.statistics import Generation

WEEK = 7 * 86_400.0  # seconds in which at most one false alarm of all signals is expected
SECONDS, REQUESTS = 600.0, 25  # at least, of a mean
_MOST = 0.01  # false alarms that a mean may raise, however long it took
KEPT = 20  # latest alarms
_LONGEST = 20.0  # log₂ of a length; longer prompts count as this long
# The highest value of each signal, and a difference that can make another configuration the
# fastest: five points of acceptance are about a tenth of the accepted length, which is more than
# usually lies between the first finalists.
SIGNALS = {"acceptance": (1.0, 0.05), "prompt_tokens": (_LONGEST, log2(1.25))}


class Drift:
    """Follows the requests that have ended. Acceptance depends on the configuration, so it starts
    anew with another one. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.signals = {
            name: Signal(ChangeDetector(0.0, high, least, seed), clock())
            for seed, (name, (high, least)) in enumerate(SIGNALS.items())
        }
        self.counts = dict.fromkeys(SIGNALS, 0)
        self.alarms: deque[DriftAlarm] = deque(maxlen=KEPT)
        self._configuration: Configuration | None = None

    def finished(self, configuration: Configuration, generation: Generation, prompt: int) -> None:
        """A request with `prompt` prompt tokens has ended."""
        drafted = sum(one.drafted for one in generation.rounds)
        accepted = sum(one.accepted for one in generation.rounds)
        self.accepted(configuration, accepted / drafted if drafted else None)
        self._add("prompt_tokens", log2(max(prompt, 1)))

    def accepted(self, configuration: Configuration, share: float | None) -> None:
        """This share of the candidates was accepted; None where there was none."""
        if configuration != self._configuration:
            self._configuration = configuration
            self.signals["acceptance"].begin(self._clock())
        if share is not None:
            self._add("acceptance", share)

    def _add(self, name: str, value: float) -> None:
        signal = self.signals[name]
        change = signal.add(value, self._clock())
        if change is None:
            return
        before, after = change.before, change.after
        if name == "prompt_tokens":
            before, after = 2**before, 2**after
        self.counts[name] += 1
        self.alarms.append(
            DriftAlarm(
                signal=name,
                time=int(time.time()),
                requests=signal.requests,
                before=before,
                after=after,
            )
        )
        signal.requests = 0


class Signal:
    """A value of each request. A detector compares its means."""

    def __init__(self, detector: ChangeDetector, now: float) -> None:
        self.detector = detector
        self.begin(now)

    def begin(self, now: float) -> None:
        """Forget all requests."""
        self.detector.begin()
        self.requests = 0  # since the last alarm or the start
        self._began, self._sum, self._count = now, 0.0, 0

    def add(self, value: float, now: float) -> Change | None:
        """Add a request's value; returns the change if it raises the alarm."""
        self.requests += 1
        self._sum += value
        self._count += 1
        passed = now - self._began
        if passed < SECONDS or self._count < REQUESTS:
            return None
        mean = self._sum / self._count
        self._began, self._sum, self._count = now, 0.0, 0
        return self.detector.add(mean, min(passed / WEEK / len(SIGNALS), _MOST))
