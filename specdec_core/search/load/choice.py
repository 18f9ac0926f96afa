"""The choice of a configuration for each load: simulated, then timed live, then chosen.

All candidates are simulated. At each load the best few, the schedule of the best and autoregressive
decoding answer the same requests live, in turns. Of those that none is shown to be better than, the
least expected cost decides, so that autoregressive decoding is chosen only where nothing is shown
to beat it. A schedule that this makes, and that was not timed, is timed as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pandas as pd

from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.cost.steps import StepTimes
from specdec_core.recordings.replay import Replay
from specdec_core.search.load.answers import Answers, replayed_answers
from specdec_core.search.load.comparison import Comparison
from specdec_core.search.load.live_runs import LiveRuns, LoadTimer
from specdec_core.search.load.measures import LoadMeasures, measure
from specdec_core.search.load.result import Compared, LoadChoice, Verdict, finite
from specdec_core.search.load.schedule import (
    TOLERANCE,
    choose_schedule,
    drafter_at,
    scheduled,
    simulate_each,
)
from specdec_core.search.load.traffic import CLIENTS, Traffic
from specdec_core.search.load.workload import LiveSettings, Load, Workload
from specdec_core.tokens.statistics import Ratio


def choose_for_load(
    candidates: Sequence[Configuration],
    replay: Replay,
    times: StepTimes,
    workload: Workload,
    live: LiveSettings | None = None,
    timer: LoadTimer | None = None,
    runs: LiveRuns | None = None,
    observer: Observer | None = None,
) -> tuple[LoadChoice, pd.DataFrame]:
    """Choose among `candidates`, which the recording can replay, and autoregressive decoding.
    Without a timer the simulation decides. Also returns what :func:`simulate_each` does."""
    settings = live or LiveSettings()
    choosing = _Choosing(candidates, replay, times, workload, settings, observer or Observer())
    if timer is None or not settings.finalists:
        return choosing.by_simulation(), choosing.simulated
    return choosing.by_live_runs(timer, runs or LiveRuns()), choosing.simulated


def finalists_at(
    simulated: pd.Series, candidates: Iterable[Configuration], first: str, live: LiveSettings
) -> list[Configuration]:
    """The configurations to time at a load, by their `simulated` objective (index: id): the one
    that the simulation chose, and those that fall behind the best by no more than
    `live.within`, the best of each family before others."""
    drafting = {c.id: c for c in candidates if c.drafter is not None}
    ranked = simulated[[i for i in simulated.index if i in drafting]]
    ranked = ranked.sort_values(ascending=False, kind="stable")
    near = [drafting[i] for i in ranked.index[ranked >= (1 - live.within) * simulated.max()]]
    leaders: dict[str, Configuration] = {}
    for each in near:
        leaders.setdefault(each.family, each)
    chosen = [drafting[first]] if first in drafting else []
    return list(dict.fromkeys([*chosen, *leaders.values(), *near]))[: live.finalists]


@dataclass
class _Choosing:
    """Candidates on their way to a choice."""

    candidates: Sequence[Configuration]
    replay: Replay
    times: StepTimes
    workload: Workload
    live: LiveSettings
    observer: Observer
    rows: list[Compared] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.traffic = Traffic.of(self.workload, self.replay.recording)
        self.baseline = AUTOREGRESSIVE.model_copy(update={"sampling": self.replay.header.sampling})
        self.known = {c.id: c for c in (self.baseline, *self.candidates)}
        self._answers: dict[str, Answers] = {}
        self.by = self.workload.objective
        self._simulate()

    def _simulate(self) -> None:
        """Simulate everyone, choose a schedule, and simulate that as a whole."""
        singles, closed = list(self.known.values()), self.workload
        if not closed.closed:
            closed = Workload(clients=CLIENTS)
        simulated = self._simulated(singles, closed)
        by = self.by if self.workload.closed else closed.objective
        self.schedule = choose_schedule(simulated, singles, by)
        parts = [simulated]
        if not self.workload.closed:
            parts.append(self._simulated([*singles, self.schedule], self.workload))
        elif self.schedule not in singles:
            whole = self._simulated([self.schedule], closed)
            parts.append(whole[whole["config_id"] == self.schedule.id])
        self.simulated = pd.concat(parts, ignore_index=True)
        if not self.workload.closed:  # of its one load a schedule is a candidate like others
            self.known[self.schedule.id] = self.schedule

    def _simulated(
        self, configurations: Sequence[Configuration], workload: Workload
    ) -> pd.DataFrame:
        return simulate_each(self.replay, configurations, self.times, workload, self.observer)

    # By simulation alone

    def by_simulation(self) -> LoadChoice:
        """What the simulation chooses, and what it is compared with."""
        best = {}
        for load in self.traffic.loads:
            values = self._values(load)
            best[load] = choice = self._first(load, values)
            others = finalists_at(values, self.known.values(), choice.id, self.live)
            shown = dict.fromkeys([self.baseline, choice, *others, self.schedule])
            base = values[self.baseline.id]
            for each in shown:
                ratio = Ratio(values[each.id] / base if base else float("inf"), 1, 1)
                speedup = finite(ratio)["speedup"]
                simulated = self._simulate_one(each, load)
                self.rows.append(
                    Compared(load=load, config_id=each.id, simulated=simulated, speedup=speedup)
                )
            self.verdicts.append(Verdict(load=load, config_id=choice.id))
        return self._choice(best)

    # By live runs

    def by_live_runs(self, timer: LoadTimer, runs: LiveRuns) -> LoadChoice:
        """Time finalists at each load and choose."""
        best: dict[Load, Configuration] = {}
        kept: str | None = None
        turns = range(self.live.repeats)
        loads = self.traffic.live_loads(self.live)
        for load in loads:
            values = self._values(load)
            first = self._first(load, values)
            singles = finalists_at(values, self.known.values(), first.id, self.live)
            among = [self.baseline, *singles]
            contestants = list(dict.fromkeys([*among, self.schedule]))
            if not load.closed:
                among = contestants
            self._time(load, contestants, turns, timer, runs)
            comparison = self._compare(load, contestants, turns, runs)
            ids = [each.id for each in among]
            kept = comparison.choose(ids, kept, TOLERANCE)
            best[load] = self.known[kept]
            cost = comparison.cost(kept, ids)
            self.verdicts.append(
                Verdict(
                    load=load,
                    config_id=kept,
                    in_question=comparison.in_question(ids),
                    regret=cost.expected,
                    low=cost.low,
                    at_most=cost.high,
                )
            )
            self._add_rows(load, contestants, turns, comparison, runs)
        choice = self._choice(best)
        if choice.chosen not in (self.schedule, *best.values()):
            # The simulation had another schedule in mind.
            later = range(turns.stop, 2 * turns.stop)
            for load in loads:
                pair = list(dict.fromkeys([self.baseline, best[load], choice.chosen]))
                self._time(load, pair, later, timer, runs)
                comparison = self._compare(load, pair, later, runs)
                self._add_rows(load, [choice.chosen], later, comparison, runs)
            choice = self._choice(best)
        return choice

    def _time(
        self,
        load: Load,
        contestants: Sequence[Configuration],
        turns: range,
        timer: LoadTimer,
        runs: LiveRuns,
    ) -> None:
        self.observer.stage(f"timing {load.label} alone", len(turns) * len(contestants))
        runs.take_turns(load, contestants, turns, timer, self.observer)

    def _compare(
        self, load: Load, contestants: Sequence[Configuration], turns: range, runs: LiveRuns
    ) -> Comparison:
        records = {c.id: [runs.records(load, turn, c) for turn in turns] for c in contestants}
        return Comparison(records, load, self.by, self.workload.slo)

    def _add_rows(
        self,
        load: Load,
        contestants: Sequence[Configuration],
        turns: range,
        comparison: Comparison,
        runs: LiveRuns,
    ) -> None:
        for each in contestants:
            live = [measure(runs.records(load, turn, each), self.workload.slo) for turn in turns]
            self.rows.append(
                Compared(
                    load=load,
                    config_id=each.id,
                    simulated=self._simulate_one(each, load),
                    live=live,
                    **finite(comparison.ratio(each.id, self.baseline.id)),
                )
            )

    # What was simulated

    def _values(self, load: Load) -> pd.Series:
        """The simulated objective at a load, by id."""
        rows = self.simulated[self.simulated["load"] == load.label]
        return rows.set_index("config_id")[self.by]

    def _first(self, load: Load, values: pd.Series) -> Configuration:
        """What the simulation chooses for a load."""
        if load.clients is None:
            return self.known[str(values[list(self.known)].idxmax())]
        drafter = drafter_at(self.schedule, load.clients)
        return next(each for each in self.known.values() if each.drafter == drafter)

    def _simulate_one(self, configuration: Configuration, load: Load) -> LoadMeasures:
        if configuration.id not in self._answers:
            self._answers[configuration.id] = replayed_answers(self.replay, configuration)
        simulation = self.traffic.simulate(self._answers[configuration.id], self.times, load)
        return simulation.measure(self.workload.slo)

    def _choice(self, best: dict[Load, Configuration]) -> LoadChoice:
        if self.workload.closed:
            chosen = scheduled({load.clients or 1: each for load, each in best.items()})
        else:
            [chosen] = best.values()
        known = {**self.known, self.schedule.id: self.schedule, chosen.id: chosen}
        shown = dict.fromkeys([self.baseline.id, *(row.config_id for row in self.rows), chosen.id])
        return LoadChoice(
            by=self.by,
            slo=self.workload.slo,
            chosen=chosen,
            configurations=[known[config_id] for config_id in shown],
            rows=self.rows,
            verdicts=self.verdicts,
            simulated=len(self.known),
        )
