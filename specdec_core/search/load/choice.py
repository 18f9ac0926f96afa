"""The choice of a configuration for each load: simulated, then timed live, then chosen.

All candidates are simulated. At each load the best few and autoregressive decoding answer the same
requests live, interleaved, as long as they are in question. Among the configurations that no other
one is shown to beat, the least expected cost decides, so that autoregressive decoding is chosen
only where nothing is shown to beat it. The resulting schedule is timed as well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.cost.steps import StepTimes
from specdec_core.recordings.replay import Replay
from specdec_core.search.load.decoded import decoded_live
from specdec_core.search.load.measures import measure
from specdec_core.search.load.race import LiveRace, LoadComparison, LoadTimer
from specdec_core.search.load.result import Compared, LoadChoice, LoadVerdict, finite
from specdec_core.search.load.schedule import TOLERANCE, scheduled
from specdec_core.search.load.simulated import Simulated
from specdec_core.search.load.workload import LiveSettings, Load, Workload


def choose_for_load(
    candidates: Sequence[Configuration],
    replay: Replay,
    times: StepTimes,
    workload: Workload,
    live: LiveSettings | None = None,
    timer: LoadTimer | None = None,
    folder: Path | None = None,
    observer: Observer | None = None,
) -> tuple[LoadChoice, pd.DataFrame]:
    """Choose among `candidates`, with known rounds, and autoregressive decoding, by live runs
    that are kept in `folder`; without a timer the simulation decides. Also returns the table of all
    simulations (:func:`specdec_core.search.load.schedule.simulate_each`)."""
    settings, observer = live or LiveSettings(), observer or Observer()
    simulated = Simulated(candidates, replay, times, workload, observer)
    if timer is None or folder is None or not settings.finalists:
        return _by_simulation(simulated, settings), simulated.table
    by, slo = simulated.by, workload.slo
    race = LiveRace(settings, timer, folder, observer, by, slo)
    return _ByLiveRuns(simulated, race).run(), simulated.table


def finalists_at(
    simulated: pd.Series, candidates: Iterable[Configuration], first: str, live: LiveSettings
) -> list[Configuration]:
    """The configurations to time at a load, by their `simulated` objective (index: id): the one
    that the simulation chose, and those that fall behind the best by no more than
    `live.within`, the best of each family first. The best that drafts is always timed: with no
    other configuration to compare, autoregressive decoding has no cost."""
    drafting = {c.id: c for c in candidates if c.drafter is not None}
    ranked = simulated[[config_id for config_id in simulated.index if config_id in drafting]]
    ranked = ranked.sort_values(ascending=False, kind="stable")
    least = min((1 - live.within) * simulated.max(), ranked.max())
    near = [drafting[i] for i in ranked.index[ranked >= least]]
    leaders: dict[str, Configuration] = {}
    for each in near:
        leaders.setdefault(each.family, each)
    chosen = [drafting[first]] if first in drafting else []
    return list(dict.fromkeys([*chosen, *leaders.values(), *near]))[: live.finalists]


def _by_simulation(simulated: Simulated, live: LiveSettings) -> LoadChoice:
    """What the simulation chooses, and the best few that it did not."""
    best: dict[Load, Configuration] = {}
    rows = []
    for load in simulated.traffic.loads:
        values = simulated.values(load)
        best[load] = choice = simulated.choice(load)
        near = finalists_at(values, simulated.known.values(), choice.id, live)
        alone = values[simulated.baseline.id]
        for each in dict.fromkeys([simulated.baseline, choice, *near, simulated.schedule]):
            measures = simulated.measures(each, load)
            speedup = values[each.id] / alone if alone else None
            rows.append(Compared(load=load, config_id=each.id, simulated=measures, speedup=speedup))
    verdicts = [LoadVerdict(load=load, config_id=choice.id) for load, choice in best.items()]
    return _result(simulated, best, rows, verdicts)


@dataclass
class _ByLiveRuns:
    """A choice while it is made."""

    simulated: Simulated
    race: LiveRace
    best: dict[Load, Configuration] = field(default_factory=dict)
    rows: list[Compared] = field(default_factory=list)
    verdicts: list[LoadVerdict] = field(default_factory=list)

    def run(self) -> LoadChoice:
        """Time the finalists at each load and choose; then what that makes of all loads."""
        live = self.race.live
        for load in self.simulated.traffic.live_loads(live):
            self._choose(load)
        chosen = _together(self.best)
        if chosen not in self.best.values():
            for load in self.best:
                self.race.observer.stage(f"timing {load.label}, all together")
                contestants = [self.simulated.baseline, chosen]
                self._add_rows(load, [chosen], self.race.run(load, contestants, live.repeats))
        return _result(self.simulated, self.best, self.rows, self.verdicts)

    def _choose(self, load: Load) -> None:
        simulated = self.simulated
        values, known = simulated.values(load), simulated.known
        first = simulated.choice(load)
        finalists = finalists_at(values, known.values(), first.id, self.race.live)
        # A schedule can be the choice for an open loop alone; for clients it drafts as their best.
        schedule = [simulated.schedule] if simulated.schedule.id in known else []
        contestants = list(dict.fromkeys([simulated.baseline, *finalists, *schedule]))
        self.race.observer.stage(f"timing {load.label}")
        before = [each.id for each in self.best.values()]
        kept = before[-1] if before else None
        comparison = self.race.run(load, contestants)
        choice, cost = comparison.decision(kept, TOLERANCE, self.race.live.cost)
        self.best[load] = known[choice]
        self.verdicts.append(
            LoadVerdict(
                load=load,
                config_id=choice,
                in_question=comparison.in_question(comparison.racing),
                regret=cost.expected,
                low=cost.low,
                at_most=cost.high,
            )
        )
        self._add_rows(load, contestants, comparison)

    def _add_rows(
        self, load: Load, contestants: Sequence[Configuration], comparison: LoadComparison
    ) -> None:
        for each in contestants:
            self.rows.append(
                Compared(
                    load=load,
                    config_id=each.id,
                    simulated=self.simulated.measures(each, load),
                    live=[measure(run, self.race.slo) for run in comparison.runs[each.id]],
                    **finite(comparison.ratio(each.id, self.simulated.baseline.id)),
                )
            )


def _together(best: Mapping[Load, Configuration]) -> Configuration:
    """One configuration for all loads."""
    by_clients = {load.clients: each for load, each in best.items()}
    if None in by_clients:
        return by_clients[None]
    return scheduled({clients: each for clients, each in by_clients.items() if clients})


def _result(
    simulated: Simulated,
    best: Mapping[Load, Configuration],
    rows: Sequence[Compared],
    verdicts: Sequence[LoadVerdict],
) -> LoadChoice:
    chosen, loads = _together(best), list(best)
    known = {**simulated.known, simulated.schedule.id: simulated.schedule, chosen.id: chosen}
    shown = dict.fromkeys([simulated.baseline.id, *(row.config_id for row in rows)])
    return LoadChoice(
        by=simulated.by,
        slo=simulated.workload.slo,
        chosen=chosen,
        configurations=[known[config_id] for config_id in shown],
        rows=sorted(rows, key=lambda row: loads.index(row.load)),
        verdicts=list(verdicts),
        simulated=len(simulated.known),
        decoded=[each for each in shown if decoded_live(simulated.replay, known[each])],
        pace=simulated.table["seconds"].sum() / simulated.table["took"].sum(),
    )
