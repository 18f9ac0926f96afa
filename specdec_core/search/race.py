"""Who decodes fastest, by times that are looked at while they come in.

A lap times one prompt under everyone still in question, in turns. The intervals hold at every lap
at once, so a race may stop, or drop who is shown to be slower, as soon as they allow it: they are
confidence sequences for a mean of unknown variance (Wang and Ramdas, *Anytime-valid t-tests and
confidence sequences for Gaussian means with unknown variance*, Sequential Analysis 2025, Thm. 4.9).
The prompts are the sample: what is asked for is the speed on the traffic that they come from.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, exp, inf, log, sqrt
from typing import Generic, TypeVar

import numpy as np

from specdec_core.tokens.statistics import Ratio, as_long

TIGHTEST = 24  # prompts at which the intervals are narrowest for what they promise
DRAWS = 2000

Name = TypeVar("Name", bound=Hashable)


def width(n: int, alpha: float) -> float:
    """Half the width, in standard deviations (divided by n), of a 1 − alpha confidence sequence
    after n values.

    With q = (α²c² / (n + c²))^(1/n) it is √((1 − q)(n + c²) / (q(n + c²) − c²)), where that exists.
    The prior's precision c² makes it narrowest at about :data:`TIGHTEST` values.
    """
    precision = TIGHTEST / (1 - 2 * log(alpha) + log(1 - 2 * log(alpha)))
    known = n + precision
    q = (alpha**2 * precision / known) ** (1 / n)
    room = q * known - precision
    return sqrt((1 - q) * known / room) if room > 0 else inf


@dataclass(frozen=True)
class Standing(Generic[Name]):
    """How a race stands.

    `loss` is how much longer than the fastest the champion is expected to take, `at_most` what that
    can be at the most, with the race's confidence; both as shares of the fastest's time.
    """

    champion: Name
    in_question: tuple[Name, ...]
    loss: float
    at_most: float


class Race(Generic[Name]):
    """Times of some contestants on the same prompts. All intervals hold together with probability
    `confidence`, also those of up to `newcomers` contestants that enter later."""

    def __init__(
        self, contestants: Sequence[Name], newcomers: int = 0, confidence: float = 0.95
    ) -> None:
        self.contestants = tuple(contestants)
        self.alpha = (1 - confidence) / max(comb(len(self.contestants) + newcomers, 2), 1)
        # Seconds by prompt and turn, for as many tokens as the prompt's first output has.
        self._times: dict[Name, dict[Hashable, dict[int, float]]] = {
            c: {} for c in self.contestants
        }
        self._lengths: dict[Hashable, int] = {}
        # Seconds behind the first tokens so far, and the tokens that were written in them.
        self._decoded = {c: np.zeros(2) for c in self.contestants}

    def enter(self, newcomers: Sequence[Name]) -> None:
        """Let further contestants take part."""
        self.contestants += tuple(newcomers)
        self._times |= {newcomer: {} for newcomer in newcomers}
        self._decoded |= {newcomer: np.zeros(2) for newcomer in newcomers}

    @property
    def prompts(self) -> int:
        """How many prompts were timed."""
        return len(self._lengths)

    def add(
        self,
        contestant: Name,
        prompt: Hashable,
        seconds: float,
        tokens: int,
        turn: int | None = None,
        reading: float = 0.0,
    ) -> None:
        """What decoding `tokens` tokens behind a prompt took, `reading` of it to the first one
        (0: unknown), in which turn of the prompt; unset, it is the contestant's next. Only what
        took the same turns is compared, for the machine may be slower in another."""
        length = self._lengths.setdefault(prompt, max(tokens, 1))
        times = self._times[contestant].setdefault(prompt, {})
        reading, tokens = min(reading, seconds), max(tokens, 1)
        decoded = self._decoded[contestant]
        decoded += seconds - reading, tokens - (reading > 0)
        times[len(times) if turn is None else turn] = as_long(
            seconds, reading, tokens, length, float(decoded[0] / max(decoded[1], 1))
        )

    def ratio(self, candidate: Name, baseline: Name) -> Ratio:
        """How many times faster `candidate` is than `baseline` on the prompts that both decoded in
        the same turns.

        The ratio of summed times, r = Σy / Σx, has log r̂ − log r ≈ the mean of
        ψ = y/ȳ − x/x̄ over prompts (the delta method), whose sequence gives the interval.
        """
        if candidate == baseline:
            return Ratio(1.0, 1.0, 1.0)
        x, y = self._together([candidate, baseline])
        if not len(x):
            return Ratio(1.0, 0.0, inf)
        value = float(y.sum() / x.sum())
        half = width(len(x), self.alpha)
        if half == inf:
            return Ratio(value, 0.0, inf)
        half *= float((y / y.mean() - x / x.mean()).std())
        return Ratio(value, value * exp(-half), value * exp(half))

    @property
    def in_question(self) -> tuple[Name, ...]:
        """Those that no other one is shown to be faster than."""
        return tuple(
            slower
            for slower in self.contestants
            if all(self.ratio(c, slower).low <= 1 for c in self.contestants if c != slower)
        )

    def standing(self) -> Standing[Name]:
        """Who would be chosen now, and what that may cost."""
        question = self.in_question
        losses = self._losses(question)
        champion = min(question, key=losses.__getitem__)
        highest = max(self.ratio(c, champion).high for c in question)
        return Standing(champion, question, losses[champion], highest - 1)

    def _losses(self, question: Collection[Name]) -> Mapping[Name, float]:
        """E[T_c / min T − 1] for each contestant in question, by the Bayesian bootstrap over the
        prompts that all of them decoded in the same turns (Rubin, 1981)."""
        times = self._together(question)
        if not times.size:
            return dict.fromkeys(question, inf)
        weights = np.random.default_rng(0).dirichlet(np.ones(times.shape[1]), DRAWS)
        totals = weights @ times.T  # (draws, contestants)
        losses = (totals / totals.min(axis=1, keepdims=True) - 1).mean(axis=0)
        return dict(zip(question, map(float, losses), strict=True))

    def _together(self, contestants: Collection[Name]) -> np.ndarray:
        """The median seconds of each, by prompt, in the turns of it that all of them took: shape
        (contestants, prompts)."""
        columns = []
        for prompt in self._lengths:
            each = [self._times[c].get(prompt, {}) for c in contestants]
            if turns := set.intersection(*map(set, each)):
                columns.append([np.median([times[turn] for turn in turns]) for times in each])
        return np.array(columns).reshape(-1, len(contestants)).T
