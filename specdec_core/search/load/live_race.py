"""A race at one load: everyone answers its requests twice, those still in question again, until the
choice is shown to cost little enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.search.load.comparison import LoadComparison
from specdec_core.search.load.live_runs import LiveRuns, LoadTimer
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

    def run(
        self, load: Load, contestants: Sequence[Configuration], first: int = 0
    ) -> LoadComparison:
        """Run turns, numbered from `first`, until one configuration is left, the choice is shown to
        cost at most `live.cost`, or the repeats are used. A configuration that is shown to be
        slower than another leaves the race."""
        racing = list(contestants)
        taken = {each.id: list[int]() for each in contestants}
        looks = looks_within(self.live.repeats)
        for turn in range(self.live.repeats):
            self.runs.take_turn(load, racing, first + turn, self.timer, self.observer)
            for each in racing:
                taken[each.id].append(first + turn)
            if turn + 1 not in looks:
                continue
            comparison = self._comparison(load, contestants, taken, len(looks))
            in_question = comparison.in_question(comparison.racing)
            racing = [each for each in racing if each.id in in_question]
            if len(racing) == 1 or comparison.decision()[1].high <= self.live.cost:
                break
        return comparison

    def _comparison(
        self,
        load: Load,
        contestants: Sequence[Configuration],
        taken: dict[str, list[int]],
        looks: int,
    ) -> LoadComparison:
        records = {
            each.id: [self.runs.records(load, turn, each) for turn in taken[each.id]]
            for each in contestants
        }
        return LoadComparison(records, load, self.by, self.slo, looks)


def looks_within(repeats: int) -> list[int]:
    """Turns after which a race of at most so many is looked at, each half as many again as the one
    before: every look widens the intervals of all."""
    after, looks = _SURE, list[int]()
    while after < repeats:
        looks.append(after)
        after += after // 2
    return [*looks, repeats]
