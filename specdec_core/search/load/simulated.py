"""All candidates at every load of a workload, simulated."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Self

import pandas as pd

from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.cost import Profile
from specdec_core.cost.steps import StepTimes
from specdec_core.recordings.replay import Replay
from specdec_core.search.load.answers import replayed_answers
from specdec_core.search.load.decoded import decoded_live
from specdec_core.search.load.measures import LoadMeasures, measure
from specdec_core.search.load.schedule import choose_schedule, drafter_at
from specdec_core.search.load.step_costs import StepCosts
from specdec_core.search.load.traffic import Traffic
from specdec_core.search.load.workload import CLIENTS, Load, Workload

_RECENT = 16  # latest configurations: their rounds are kept


class Simulated:
    """Simulates `candidates`, autoregressive decoding (`baseline`) and the `schedule` that it would
    choose. `times` are the times of steps, or a profile that gives them for each configuration.
    `known` are those that may be chosen for one load, by id; for an open loop, which has no other,
    the schedule is among them. Raises :class:`UserError` for a candidate
    without known rounds.

    `table` has a row for each configuration and load: `load`, its label; `clients`, 0 of an open
    loop; `config_id`; `decoded_live`, whether its rounds were decoded rather than replayed;
    `tokens_per_second`, `request_speed`, `goodput` and medians of `ttft` and `tpot` (see
    :class:`~specdec_core.search.load.measures.LoadMeasures`); the `steps` and `seconds` that were
    simulated, and the seconds that it `took`.
    """

    def __init__(
        self,
        candidates: Sequence[Configuration],
        replay: Replay,
        times: StepTimes | Profile,
        workload: Workload,
        observer: Observer,
    ) -> None:
        self.replay, self.times, self.workload = replay, times, workload
        self.traffic = Traffic.of(workload, replay.recording)
        self.by = workload.objective
        self.baseline = AUTOREGRESSIVE.model_copy(update={"sampling": replay.header.sampling})
        self.known = {each.id: each for each in (self.baseline, *candidates)}
        self._costs = lru_cache(_RECENT)(self._replayed)
        # A schedule is made of numbers of clients, also for requests that come at a rate.
        closed = workload if workload.closed else Workload(clients=CLIENTS)
        traffic = Traffic.of(closed, replay.recording)
        rows = self._simulate(self.known.values(), traffic, observer)
        table = pd.DataFrame(rows)
        self.schedule = choose_schedule(table, self.known.values(), closed.objective)
        further = [] if self.schedule.id in self.known else [self.schedule]
        if not workload.closed:
            self.known[self.schedule.id] = self.schedule
            further = list(self.known.values())
        self.table = pd.DataFrame(rows + self._simulate(further, self.traffic, observer))

    def at(self, load: Load) -> pd.DataFrame:
        """The rows of :attr:`table` at a load, by id."""
        return self.table[self.table["load"] == load.label].set_index("config_id")

    def values(self, load: Load) -> pd.Series:
        """The objective at a load, by id."""
        return self.at(load)[self.by]

    def at_speeds(self, speeds: Mapping[str, pd.Series]) -> Self:
        """The known configurations with other tokens a second: by the loads' labels, of
        configurations by their ids. What was simulated stays in the table as
        `simulated_tokens_per_second`."""
        table = self.table[self.table["config_id"].isin(list(self.known))]
        table = table.rename(columns={"tokens_per_second": "simulated_tokens_per_second"})
        places = zip(table["load"], table["config_id"], strict=True)
        table["tokens_per_second"] = [float(speeds[load][key]) for load, key in places]
        found = copy(self)
        found.table = table
        found.schedule = choose_schedule(table, self.known.values(), self.by)
        return found

    def choice(self, load: Load) -> Configuration:
        """What the simulation would choose for a load."""
        if load.clients is None:
            return self.known[str(self.values(load)[list(self.known)].idxmax())]
        if self.schedule.id in self.known:
            return self.known[self.schedule.id]
        drafter = drafter_at(self.schedule, load.clients)
        return next(each for each in self.known.values() if each.drafter == drafter)

    def measures(self, configuration: Configuration, load: Load) -> LoadMeasures:
        """What the requests of a load experience, of as many requests as that has."""
        simulation = self.traffic.simulate(self._costs(configuration), load)
        return measure(simulation.records, self.workload.slo)

    def _replayed(self, configuration: Configuration) -> StepCosts:
        times, whole = self.times, False
        if isinstance(times, Profile):
            whole = times.whole_chains
            times = StepTimes.of(times.under(configuration))
        return StepCosts(replayed_answers(self.replay, configuration, whole), times)

    def _simulate(
        self, configurations: Collection[Configuration], traffic: Traffic, observer: Observer
    ) -> list[dict[str, object]]:
        """Rows of :attr:`table`."""
        observer.stage("simulating load", len(configurations))
        rows: list[dict[str, object]] = []
        for configuration in configurations:
            costs, live = self._costs(configuration), decoded_live(self.replay, configuration)
            for load in traffic.loads:
                simulation = traffic.simulate(costs, load)
                measures = measure(simulation.records, self.workload.slo)
                rows.append(
                    {
                        "load": load.label,
                        "clients": load.clients or 0,
                        "config_id": configuration.id,
                        "decoded_live": live,
                        "tokens_per_second": measures.tokens_per_second,
                        "request_speed": measures.request_speed,
                        "goodput": measures.goodput,
                        "ttft": measures.value("ttft", 50),
                        "tpot": measures.value("tpot", 50),
                        "steps": simulation.steps,
                        "seconds": simulation.seconds,
                        "took": simulation.took,
                    }
                )
            observer.step()
        return rows
