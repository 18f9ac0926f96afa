"""The choice of a configuration for each load: simulated, then timed live, then chosen.

All candidates are simulated. At each load the best few and autoregressive decoding answer the same
requests live, interleaved, as long as they are in question. Among the configurations that no other
one is shown to beat, the least expected cost decides, so that autoregressive decoding is chosen
only where nothing is shown to beat it. The resulting schedule is timed as well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from specdec_core.base.observer import SILENT, Observer
from specdec_core.config import Configuration
from specdec_core.cost.profile import Profile
from specdec_core.cost.steps import StepTimes
from specdec_core.recordings.replay import Replay
from specdec_core.search.load.decoded import decoded_live
from specdec_core.search.load.live_race import LiveRace, LoadComparison, LoadTimer
from specdec_core.search.load.measures import measure
from specdec_core.search.load.records import records_frame
from specdec_core.search.load.result import Compared, LoadChoice, LoadVerdict, finite
from specdec_core.search.load.schedule import TOLERANCE, scheduled
from specdec_core.search.load.simulated import Simulated
from specdec_core.search.load.workload import LiveSettings, Load, Workload


def choose_for_load(
    candidates: Sequence[Configuration],
    replay: Replay,
    times: StepTimes | Profile,
    workload: Workload,
    live: LiveSettings | None = None,
    timer: LoadTimer | None = None,
    folder: Path | None = None,
    observer: Observer = SILENT,
) -> tuple[LoadChoice, pd.DataFrame]:
    """Choose among `candidates`, with known rounds, and autoregressive decoding, by live runs
    that are kept in `folder`; without a timer the simulation decides. Also returns the table of all
    simulations (:class:`~specdec_core.search.load.simulated.Simulated`)."""
    live = live or LiveSettings()
    simulated = Simulated(candidates, replay, times, workload, observer)
    race = None
    if timer is not None and folder is not None and live.finalists:
        race = LiveRace(live, timer, folder, observer, simulated.by, workload.slo)
    return _Choice(simulated, live, race).made(), simulated.table


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


@dataclass
class _Choice:
    """A choice while it is made: by live runs, or without a `race` by simulation."""

    simulated: Simulated
    live: LiveSettings
    race: LiveRace | None
    best: dict[Load, Configuration] = field(default_factory=dict)
    rows: list[Compared] = field(default_factory=list)
    verdicts: list[LoadVerdict] = field(default_factory=list)

    def made(self) -> LoadChoice:
        """Choose for each load, and then compare what that makes of all loads."""
        traffic = self.simulated.traffic
        for load in traffic.live_loads(self.live) if self.race else traffic.loads:
            self._choose(load)
        chosen = _together(self.best)
        if self.race is not None and chosen not in self.best.values():
            for load in self.best:
                contestants = [self.simulated.baseline, chosen]
                comparison = self.race.run(load, contestants, together=True)
                self._add_rows(load, [chosen], comparison)
        return self._result(chosen)

    def _choose(self, load: Load) -> None:
        simulated = self.simulated
        known, schedule, first = simulated.known, simulated.schedule, simulated.choice(load)
        near = finalists_at(simulated.values(load), known.values(), first.id, self.live)
        comparison = None
        if self.race is None:
            self.best[load] = first
            verdict = LoadVerdict(load=load, config_id=first.id)
            contestants = [simulated.baseline, first, *near, schedule]
        else:
            # A schedule can be the choice for an open loop alone; for clients it drafts as their
            # best.
            contestants = [simulated.baseline, *near, *([schedule] if schedule.id in known else [])]
            comparison = self.race.run(load, list(dict.fromkeys(contestants)))
            kept = next((each.id for each in reversed(self.best.values())), None)
            # Speculation loses nothing to autoregressive decoding.
            tolerance = TOLERANCE if comparison.decision()[0] != simulated.baseline.id else 0.0
            choice, cost = comparison.decision(kept, tolerance, self.live.cost)
            self.best[load] = known[choice]
            verdict = LoadVerdict(
                load=load,
                config_id=choice,
                in_question=comparison.in_question(comparison.racing),
                regret=cost.expected,
                low=cost.low,
                at_most=cost.high,
            )
        self.verdicts.append(verdict)
        self._add_rows(load, contestants, comparison)

    def _add_rows(
        self,
        load: Load,
        configurations: Iterable[Configuration],
        comparison: LoadComparison | None = None,
    ) -> None:
        simulated, baseline = self.simulated, self.simulated.baseline.id
        for each in dict.fromkeys(configurations):
            live: dict[str, Any]
            if comparison is None:
                values = simulated.values(load)
                alone = values[baseline]
                live = {"speedup": values[each.id] / alone if alone else None}
            else:
                slo = simulated.workload.slo
                runs = [measure(records_frame(run), slo) for run in comparison.runs[each.id]]
                live = {"live": runs, **finite(comparison.ratio(each.id, baseline))}
            measures = simulated.measures(each, load)
            self.rows.append(Compared(load=load, config_id=each.id, simulated=measures, **live))

    def _result(self, chosen: Configuration) -> LoadChoice:
        simulated, loads = self.simulated, list(self.best)
        known = {**simulated.known, simulated.schedule.id: simulated.schedule, chosen.id: chosen}
        shown = dict.fromkeys([simulated.baseline.id, *(row.config_id for row in self.rows)])
        return LoadChoice(
            by=simulated.by,
            slo=simulated.workload.slo,
            chosen=chosen,
            configurations=[known[config_id] for config_id in shown],
            rows=sorted(self.rows, key=lambda row: loads.index(row.load)),
            verdicts=self.verdicts,
            simulated=len(simulated.known),
            decoded=[each for each in shown if decoded_live(simulated.replay, known[each])],
            pace=simulated.table["seconds"].sum() / simulated.table["took"].sum(),
        )


def _together(best: Mapping[Load, Configuration]) -> Configuration:
    """One configuration for all loads."""
    by_clients = {load.clients: each for load, each in best.items()}
    if None in by_clients:
        return by_clients[None]
    return scheduled({clients: each for clients, each in by_clients.items() if clients})
