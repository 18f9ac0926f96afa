"""All candidates at every load of a workload, simulated."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.cost.steps import StepTimes
from specdec_core.recordings.replay import Replay
from specdec_core.search.load.answers import replayed_answers
from specdec_core.search.load.measures import LoadMeasures
from specdec_core.search.load.schedule import choose_schedule, drafter_at, simulate_each
from specdec_core.search.load.step_costs import StepCosts
from specdec_core.search.load.traffic import Traffic
from specdec_core.search.load.workload import CLIENTS, Load, Workload


class Simulated:
    """The simulation of `candidates`, of autoregressive decoding (`baseline`) and of the `schedule`
    that it would choose. `known` are those that may be chosen for one load, by id; for an open
    loop, which has no other, the schedule is among them. `table` is as of :func:`simulate_each`."""

    def __init__(
        self,
        candidates: Sequence[Configuration],
        replay: Replay,
        times: StepTimes,
        workload: Workload,
        observer: Observer,
    ) -> None:
        self.replay, self.times, self.workload = replay, times, workload
        self.traffic = Traffic.of(workload, replay.recording)
        self.by = workload.objective
        self.baseline = AUTOREGRESSIVE.model_copy(update={"sampling": replay.header.sampling})
        self.known = {c.id: c for c in (self.baseline, *candidates)}
        self._costs: dict[str, StepCosts] = {}
        singles = list(self.known.values())
        # A schedule is made of numbers of clients, also for requests that come at a rate.
        closed = workload if workload.closed else Workload(clients=CLIENTS)
        simulated = simulate_each(replay, singles, times, closed, observer)
        self.schedule = choose_schedule(simulated, singles, closed.objective)
        parts = [simulated]
        if not workload.closed:
            self.known[self.schedule.id] = self.schedule
            everyone = list(self.known.values())
            parts.append(simulate_each(replay, everyone, times, workload, observer))
        elif self.schedule.id not in self.known:
            whole = simulate_each(replay, [self.schedule], times, workload, observer)
            parts.append(whole[whole["config_id"] == self.schedule.id])
        self.table = pd.concat(parts, ignore_index=True)

    def values(self, load: Load) -> pd.Series:
        """The objective at a load, by id."""
        rows = self.table[self.table["load"] == load.label]
        return rows.set_index("config_id")[self.by]

    def choice(self, load: Load) -> Configuration:
        """What the simulation would choose for a load."""
        if load.clients is None:
            return self.known[str(self.values(load)[list(self.known)].idxmax())]
        drafter = drafter_at(self.schedule, load.clients)
        return next(each for each in self.known.values() if each.drafter == drafter)

    def measures(self, configuration: Configuration, load: Load) -> LoadMeasures:
        """What the requests of a load experience, of as many requests as that has."""
        if configuration.id not in self._costs:
            answers = replayed_answers(self.replay, configuration)
            self._costs[configuration.id] = StepCosts(answers, self.times)
        simulation = self.traffic.simulate(self._costs[configuration.id], load)
        return simulation.measure(self.workload.slo)
