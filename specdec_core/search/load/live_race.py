"""A race at one load: everyone answers its requests once, those still in question again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.search.load.comparison import Comparison
from specdec_core.search.load.live_runs import LiveRuns, LoadTimer
from specdec_core.search.load.schedule import TOLERANCE
from specdec_core.search.load.workload import LiveSettings, Load, Objective, Slo


@dataclass(frozen=True)
class LiveRace:
    """Races of configurations, of which `runs` keeps what was taken."""

    live: LiveSettings
    timer: LoadTimer
    runs: LiveRuns
    observer: Observer
    by: Objective
    slo: Slo | None

    def run(self, load: Load, contestants: Sequence[Configuration], first: int = 0) -> Comparison:
        """Turns, numbered from `first`, until one is left, the choice costs next to nothing, or the
        repeats or the seconds are used.

        Whoever another is shown to be better than takes no further part. One run tells nothing of
        how much runs differ, so after the first turn that has to be by more than `live.within`, and
        costs count from the second one on.
        """
        racing, ids = list(contestants), [each.id for each in contestants]
        taken = {config_id: list[int]() for config_id in ids}
        end = 0.0
        for turn in range(first, first + self.live.repeats):
            self.runs.take_turn(load, racing, turn, self.timer, self.observer)
            for each in racing:
                taken[each.id].append(turn)
            comparison = self._comparison(load, contestants, taken)
            beyond = self.live.within if turn == first else 0
            left = comparison.in_question([each.id for each in racing], beyond)
            racing = [each for each in racing if each.id in left]
            cost = comparison.cost(comparison.choose(ids), ids).high
            end = end or perf_counter() + self.live.seconds
            if len(racing) == 1 or (turn > first and cost <= TOLERANCE) or perf_counter() >= end:
                break
        return comparison

    def _comparison(
        self, load: Load, contestants: Sequence[Configuration], taken: dict[str, list[int]]
    ) -> Comparison:
        records = {
            each.id: [self.runs.records(load, turn, each) for turn in taken[each.id]]
            for each in contestants
        }
        return Comparison(records, load, self.by, self.slo)
