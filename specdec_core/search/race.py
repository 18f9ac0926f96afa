"""The fastest configuration, by times that are compared while they are measured.

A lap times one prompt under every configuration in question, interleaved. The intervals hold at
every lap at once, so a race may stop, or drop a configuration that is shown to be slower, as soon
as they allow it: they are confidence sequences for a mean of unknown variance (Wang and Ramdas,
*Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance*,
Sequential Analysis 2025, Thm. 4.9). The prompts are the sample: the result is the speed on the
traffic that they come from."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, exp, inf, log, sqrt
from typing import NamedTuple

import numpy as np

from specdec_core.measure.paired import unbeaten
from specdec_core.tokens.statistics import Ratio, as_long

TIGHTEST = 24  # prompts at which the intervals are narrowest for what they promise
DRAWS = 2000


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


class _Time(NamedTuple):
    """What an output took, `prefill` of it to its first token (0: unknown)."""

    seconds: float
    prefill: float
    tokens: int


@dataclass(frozen=True)
class Standing:
    """How a race stands.

    `loss` is how much longer than the fastest the champion is expected to take, `at_most` what that
    can be at the most, with the race's confidence; both as shares of the fastest's time.
    """

    champion: str
    in_question: tuple[str, ...]
    loss: float
    at_most: float


class Race:
    """Times of some contestants on the same prompts. All intervals hold together with probability
    `confidence`, also with up to `newcomers` contestants that enter later."""

    def __init__(
        self, contestants: Sequence[str], newcomers: int = 0, confidence: float = 0.95
    ) -> None:
        self.contestants = tuple(contestants)
        self.alpha = (1 - confidence) / max(comb(len(self.contestants) + newcomers, 2), 1)
        # By prompt and turn.
        self._times: dict[str, dict[Hashable, dict[int, _Time]]] = {c: {} for c in contestants}
        self._lengths: dict[Hashable, int] = {}  # of each prompt's first output

    def enter(self, newcomers: Sequence[str]) -> None:
        """Let further contestants take part."""
        self.contestants += tuple(newcomers)
        self._times |= {newcomer: {} for newcomer in newcomers}

    @property
    def prompts(self) -> int:
        """How many prompts were timed."""
        return len(self._lengths)

    def add(
        self,
        contestant: str,
        prompt: Hashable,
        seconds: float,
        tokens: int,
        turn: int | None = None,
        prefill: float = 0.0,
    ) -> None:
        """Decoding `tokens` tokens after a prompt took `seconds`, `prefill` of them to the first
        token (0: unknown), in a turn of the prompt; unset, the contestant's next. Only times of the
        same turn are compared, because the machine may be slower in another."""
        self._lengths.setdefault(prompt, tokens)
        times = self._times[contestant].setdefault(prompt, {})
        times[len(times) if turn is None else turn] = _Time(seconds, prefill, tokens)

    def seconds(self, contestant: str, prompts: Collection[Hashable]) -> dict[int, list[float]]:
        """Seconds of each of `prompts`, by the turns in which the contestant decoded all of
        them."""
        times = [self._times[contestant][prompt] for prompt in prompts]
        turns = sorted(set.intersection(*map(set, times)))
        return {turn: [of_prompt[turn].seconds for of_prompt in times] for turn in turns}

    def ratio(self, candidate: str, baseline: str) -> Ratio:
        """How many times faster `candidate` is than `baseline` on the prompts that both decoded in
        the same turns.

        The ratio of summed times, r = Σy / Σx, has log r̂ − log r ≈ the mean of
        ψ = y/ȳ − x/x̄ over prompts (the delta method). Its sequence gives the interval.
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
    def in_question(self) -> tuple[str, ...]:
        """The contestants that no other one is shown to be faster than."""
        return tuple(unbeaten(self.contestants, self.ratio))

    def standing(self) -> Standing:
        """The choice at this point, and its cost."""
        question = self.in_question
        losses = self._losses(question)
        champion = min(question, key=losses.__getitem__)
        highest = max(self.ratio(c, champion).high for c in question)
        return Standing(champion, question, losses[champion], highest - 1)

    def _losses(self, question: Collection[str]) -> Mapping[str, float]:
        """E[T_c / min T − 1] for each contestant in question, by the Bayesian bootstrap over the
        prompts that all of them decoded in the same turns (Rubin, 1981)."""
        times = self._together(question)
        if not times.size:
            return dict.fromkeys(question, inf)
        weights = np.random.default_rng(0).dirichlet(np.ones(times.shape[1]), DRAWS)
        totals = weights @ times.T  # (draws, contestants)
        losses = (totals / totals.min(axis=1, keepdims=True) - 1).mean(axis=0)
        return dict(zip(question, map(float, losses), strict=True))

    def _together(self, contestants: Collection[str]) -> np.ndarray:
        """The median seconds of each for as many tokens as the prompt's first output has, by
        prompt, in the turns of it that all of them took: shape (contestants, prompts)."""
        each = [self._for_first_lengths(contestant) for contestant in contestants]
        by_prompt: dict[Hashable, list[list[float]]] = {}
        for prompt, turn in each[0]:
            if all((prompt, turn) in times for times in each):
                row = [times[prompt, turn] for times in each]
                by_prompt.setdefault(prompt, []).append(row)
        medians = [np.median(rows, axis=0) for rows in by_prompt.values()]
        return np.array(medians).reshape(-1, len(contestants)).T

    def _for_first_lengths(self, contestant: str) -> dict[tuple[Hashable, int], float]:
        """The contestant's seconds by prompt and turn, each for as many tokens as the prompt's
        first output has."""
        times = {
            (prompt, turn): time
            for prompt, turns in self._times[contestant].items()
            for turn, time in turns.items()
        }
        if not times:
            return {}
        seconds, prefill, tokens = map(np.array, zip(*times.values(), strict=True))
        wanted = [self._lengths[prompt] for prompt, _ in times]
        adjusted = as_long(seconds, prefill, tokens, wanted)
        return dict(zip(times, adjusted.tolist(), strict=True))
