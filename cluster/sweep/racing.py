"""A race of finalists: everyone decodes every prompt, then only those still in question go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from time import perf_counter

from cluster.sweep.timing import Decode, InterleavedTimes
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.engine import Request
from specdec_core.search.plan import SweepSettings
from specdec_core.search.race import Race
from specdec_core.search.results import RaceSummary


def run_race(
    contestants: Sequence[Configuration],
    requests: Sequence[Request],
    further: Sequence[Request],
    decode: Decode,
    forget: Callable[[], None],
    plan: SweepSettings,
    observer: Observer,
) -> tuple[InterleavedTimes, RaceSummary]:
    """Time `contestants` on `requests`; then those in question on the `further` ones and on all of
    them again, up to `plan.repeats` times, until the choice is good enough or the time is used.

    `forget` makes drafters forget what they have learned. Requests are told apart by their seeds.
    Returns the times on `requests` and how the race went.
    """
    watch, race = InterleavedTimes(), Race([c.id for c in contestants])
    observer.stage(f"timing {len(contestants) - 1} finalists alone", len(requests))
    kept = {request.seed for request in requests}
    laps, began, question = 0, perf_counter(), list(contestants)
    for repeat, request in _laps(requests, further, plan.repeats):
        if laps == len(requests):
            observer.stage("timing those in question")
            began = perf_counter()
        if laps >= len(requests):
            standing = race.standing()
            late = perf_counter() - began >= plan.race.seconds
            if late or standing.at_most <= plan.race.within:
                break
            question = [c for c in contestants if c.id in standing.in_question]
        if request is requests[0]:
            forget()  # every repeat does the same work
        for who, seconds, generation in watch.turn(decode, question, request):
            race.add(who.id, request.seed, seconds, len(generation.tokens))
            if request.seed in kept:
                watch.keep(who, repeat, seconds, generation)
        laps += 1
        observer.step()
    standing = race.standing()
    return watch, RaceSummary(
        champion=standing.champion,
        in_question=list(standing.in_question),
        prompts=race.prompts,
        laps=laps,
        within=plan.race.within,
        loss=standing.loss,
        at_most=standing.at_most if isfinite(standing.at_most) else None,
    )


def _laps(
    requests: Sequence[Request], further: Sequence[Request], repeats: int
) -> Iterator[tuple[int, Request]]:
    """The order of the race: each prompt with its repeat."""
    for repeat in range(repeats):
        for request in (*requests, *further):
            yield repeat, request
