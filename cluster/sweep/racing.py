"""A race of finalists: each decodes every prompt, then the ones that may be fastest continue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil, isfinite
from time import perf_counter
from typing import Protocol

import numpy as np

from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.engine import Request
from specdec_core.measure.comparison import interleaved
from specdec_core.search.plan import RaceSettings
from specdec_core.search.race import Race
from specdec_core.search.results import RaceSummary, Timing
from specdec_core.tokens.statistics import Generation

# From the seconds of the timed configurations, by id: the configurations that may be faster than
# all timed ones, the likeliest first.
Challengers = Callable[[Mapping[str, float]], Sequence[Configuration]]


class Timer(Protocol):
    """Decodes requests alone, one after the other, under one configuration or another."""

    def prepare(self, configurations: Sequence[Configuration], request: Request) -> None:
        """Run each configuration for a moment, untimed."""

    def decode(self, configuration: Configuration, request: Request) -> tuple[float, Generation]:
        """Seconds and output of a request; a drafter keeps what it learns from it."""

    def forget(self) -> None:
        """Drop everything that drafters have learned."""


class FinalistRace:
    """A race of `contestants`. The first of them is autoregressive decoding.

    First all decode the sweep's `requests`. Then challengers, which may be faster by the first
    times, decode them together with autoregressive decoding and the contestants in question. Then
    the contestants in question decode `further` requests, and all requests again.

    Drafters are reset before every pass over requests, so that all repeats do the same work. The
    seed of a request identifies it.
    """

    def __init__(
        self,
        contestants: Sequence[Configuration],
        requests: Sequence[Request],
        further: Sequence[Request],
        timer: Timer,
        settings: RaceSettings,
    ) -> None:
        self.contestants, self.settings = list(contestants), settings
        self.requests, self.further, self.timer = requests, further, timer
        self.race = Race([c.id for c in contestants], settings.challengers)
        self.laps = 0
        self._pass = 0  # over requests
        self._generations: dict[str, dict[int, Generation]] = {}  # the first, by id and seed

    def run(self, challengers: Challengers, repeats: int, observer: Observer) -> RaceSummary:
        """Run until the choice is good enough, the time is used or everything has been decoded
        `repeats` times."""
        observer.stage(f"timing {len(self.contestants) - 1} finalists alone", len(self.requests))
        self._time_all(self.contestants, observer)
        end = perf_counter() + self.settings.seconds
        left = self.settings.challengers
        while perf_counter() < end and (new := challengers(self.taken())[: ceil(left / 2)]):
            # Times of the same pass are compared.
            again = dict.fromkeys([self.contestants[0].id, *self.race.in_question])
            if self._expected(again, len(new)) > end - perf_counter():
                break
            observer.stage(f"timing {len(new)} challengers", len(self.requests))
            known = [self._configuration(config_id) for config_id in again]
            self.contestants += new
            self.race.enter([configuration.id for configuration in new])
            self._time_all([*known, *new], observer)
            left -= len(new)
        observer.stage("timing the finalists in question")
        for request in self._rest(repeats):
            standing = self.race.standing()
            if perf_counter() >= end or standing.at_most <= self.settings.within:
                break
            self._lap([self._configuration(c) for c in standing.in_question], request, observer)
        return self._summary()

    def taken(self) -> dict[str, float]:
        """Seconds that the sweep's prompts took, by configuration id."""
        return {
            config_id: float(np.median([*self._seconds(config_id).values()], axis=0).sum())
            for config_id in self._generations
        }

    def generations(self, configuration: Configuration) -> list[Generation]:
        """The first generations of the sweep's prompts."""
        by_seed = self._generations[configuration.id]
        return [by_seed[request.seed] for request in self.requests]

    def timing(self, configuration: Configuration) -> Timing:
        """The times on the sweep's prompts."""
        baseline, generations = self.contestants[0], self.generations(configuration)
        seconds = self._seconds(configuration.id)
        if configuration == baseline:
            return Timing.of(configuration, seconds, generations)
        against = self.timing(baseline), self.generations(baseline)
        return Timing.of(configuration, seconds, generations, against)

    def _seconds(self, config_id: str) -> dict[int, list[float]]:
        """Seconds on the sweep's prompts by pass."""
        return self.race.seconds(config_id, [request.seed for request in self.requests])

    def _expected(self, known: Iterable[str], new: int) -> float:
        """The expected seconds of a pass with `known` configurations and `new` further ones, which
        are expected to take as long as the fastest."""
        taken = self.taken()
        return sum(taken[config_id] for config_id in known) + new * min(taken.values())

    def _time_all(self, configurations: Sequence[Configuration], observer: Observer) -> None:
        self.timer.prepare(configurations, self.requests[0])
        self._begin_pass()
        for request in self.requests:
            self._lap(configurations, request, observer)

    def _begin_pass(self) -> None:
        self._pass += 1
        self.timer.forget()

    def _rest(self, repeats: int) -> Iterator[Request]:
        """The prompts after the first lap over the sweep's: the further ones, then all again."""
        for requests in [self.further, *(repeats - 1) * [self.requests, self.further]]:
            self._begin_pass()
            yield from requests

    def _lap(
        self, configurations: Sequence[Configuration], request: Request, observer: Observer
    ) -> None:
        for configuration in interleaved(configurations, self.laps):
            seconds, generation = self.timer.decode(configuration, request)
            tokens, prefill = len(generation.tokens), generation.prefill_seconds
            name, seed = configuration.id, request.seed
            self.race.add(name, seed, seconds, tokens, self._pass, prefill)
            self._generations.setdefault(name, {}).setdefault(seed, generation)
        self.laps += 1
        observer.step()

    def _configuration(self, config_id: str) -> Configuration:
        return next(c for c in self.contestants if c.id == config_id)

    def _summary(self) -> RaceSummary:
        standing = self.race.standing()
        return RaceSummary(
            champion=standing.champion,
            in_question=list(standing.in_question),
            prompts=self.race.prompts,
            laps=self.laps,
            within=self.settings.within,
            loss=standing.loss,
            at_most=standing.at_most if isfinite(standing.at_most) else None,
        )
