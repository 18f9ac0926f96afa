"""Configurations raced at one load on the live engine.

A configuration's value is what its requests gained over what they cost: tokens, or requests within
the objective, over seconds. n clients that always wait receive n times what one of them receives
(Little's law), so that the end of a run, when some clients have no request left, does not count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.measure.paired import Paired
from specdec_core.measure.parts import Parts
from specdec_core.search.load.measures import by_request
from specdec_core.search.load.race import LoadContestant, LoadRace
from specdec_core.search.load.records import LoadRecord, LoadRun
from specdec_core.search.load.workload import LiveSettings, Load, Objective, Slo

_SURE = 2  # turns before a configuration leaves: a single run may have been disturbed


class LoadComparison(Paired):
    """Configurations at one load. `runs[id]` has the records of each turn, from the first on."""

    def __init__(
        self,
        runs: Mapping[str, Sequence[LoadRun]],
        load: Load,
        by: Objective,
        slo: Slo | None = None,
        looks: int = 1,
    ) -> None:
        self.runs = runs
        gained = "good" if by == "goodput" else "tokens"
        gains = {config_id: by_request(of, gained, slo) for config_id, of in runs.items()}
        costs = {config_id: by_request(of, "latency") for config_id, of in runs.items()}
        if by == "goodput" and not load.closed:
            # The time in which requests arrive is given, so goodput counts them alone.
            costs = {config_id: np.ones_like(cost) for config_id, cost in costs.items()}
        super().__init__(costs, gains, looks)


class LoadTimer(Protocol):
    """Answers the requests of a load on the live engine, alone on its devices."""

    def answer(self, configuration: Configuration, load: Load) -> LoadRun:
        """Answer the requests. Drafters begin with nothing learned."""


@dataclass
class LiveRace:
    """Races of configurations, one load after another, with their runs in `folder`."""

    live: LiveSettings
    timer: LoadTimer
    folder: Path
    observer: Observer
    by: Objective
    slo: Slo | None = None

    def run(
        self, load: Load, configurations: Sequence[Configuration], together: bool = False
    ) -> LoadComparison:
        """Race until one configuration is left, the choice is shown to cost at most `live.cost`, or
        the repeats are used. A configuration that is shown to be slower than another leaves the
        race. The runs of a race of all loads `together` are other ones than of the race before."""
        looks = looks_within(self.live.repeats)

        def compared(racing: Sequence[LoadContestant]) -> LoadComparison:
            runs = {each.name: each.runs[load.key] for each in racing}
            return LoadComparison(runs, load, self.by, self.slo, len(looks))

        def leaving(_: Load, racing: Sequence[LoadContestant]) -> Collection[str]:
            comparison = compared(racing)
            if comparison.turns not in looks:
                return ()
            in_question = comparison.in_question(comparison.racing)
            done = len(in_question) == 1 or comparison.decision()[1].high <= self.live.cost
            return [each.name for each in racing if done or each.name not in in_question]

        def answer(config: Configuration, loads: Sequence[Load]) -> Iterator[tuple[Load, LoadRun]]:
            return ((load, self.timer.answer(config, load)) for load in loads)

        parts = Parts(self.folder / "together" if together else self.folder, LoadRecord)
        race = LoadRace([[load]], self.live.repeats, parts, self.observer, leaving)
        contestants = [LoadContestant(c.id, c.id, partial(answer, c)) for c in configurations]
        stage = f"timing {load.label}{', all together' if together else ''}"
        return compared(race.run(contestants, stage))


def looks_within(repeats: int) -> list[int]:
    """The turns after which a race of at most `repeats` is looked at, each half as many again as
    the one before: every look widens the intervals of all."""
    after, looks = _SURE, list[int]()
    while after < repeats:
        looks.append(after)
        after += after // 2
    return [*looks, repeats]
