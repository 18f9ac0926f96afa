"""A race at one load: everyone answers its requests twice, those still in question again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.search.load.comparison import Comparison
from specdec_core.search.load.live_runs import LiveRuns, LoadTimer
from specdec_core.search.load.schedule import TOLERANCE
from specdec_core.search.load.workload import LiveSettings, Load, Objective, Slo

_SURE = 2  # turns before anybody leaves: one run alone does not tell that it was disturbed


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
        repeats are used. Whoever another is shown to be better than takes no further part."""
        racing = list(contestants)
        taken = {each.id: list[int]() for each in contestants}
        for turn in range(first, first + self.live.repeats):
            self.runs.take_turn(load, racing, turn, self.timer, self.observer)
            for each in racing:
                taken[each.id].append(turn)
            comparison = self._comparison(load, contestants, taken)
            if turn + 1 < first + _SURE:
                continue
            among = comparison.racing
            in_question = comparison.in_question(among)
            racing = [each for each in racing if each.id in in_question]
            cost = comparison.cost(comparison.choose(among), among)
            if len(racing) == 1 or cost.high <= TOLERANCE:
                break
        return comparison

    def _comparison(
        self, load: Load, contestants: Sequence[Configuration], taken: dict[str, list[int]]
    ) -> Comparison:
        records = {
            each.id: [self.runs.records(load, turn, each) for turn in taken[each.id]]
            for each in contestants
        }
        looks = max(self.live.repeats - _SURE + 1, 1)
        return Comparison(records, load, self.by, self.slo, looks)
