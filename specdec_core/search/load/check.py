"""The simulation of load compared with the live engine: the same requests, clients and limits.

A machine's speed varies from minute to minute by more than the simulation's error. Passes of step
times are therefore interleaved with the live runs that they are to predict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import pandas as pd

from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration, distinct_labels
from specdec_core.engine.scheduler import Limits
from specdec_core.measure.step_times import StepMeasurer, engine_runs
from specdec_core.models.pair import Pair
from specdec_core.recordings.replay import Replay
from specdec_core.search.load.answers import replayed_answers
from specdec_core.search.load.live import EngineTimer
from specdec_core.search.load.measures import LoadMeasures, measure
from specdec_core.search.load.step_costs import StepCosts
from specdec_core.search.load.traffic import Traffic
from specdec_core.search.load.workload import Load, Workload

CLIENTS = (1, 4, 8, 16)
SHARES = (0.5, 0.8)  # of the rate that keeps all slots busy
REQUESTS = 200  # at each rate
_EACH = 4  # requests for each client, …
_LEAST = 16  # … and at least

# The compared latencies by column: measure and percentile.
Compared = Mapping[str, tuple[str, int]]
OF_CLIENTS: Compared = {"tpot": ("tpot", 50), "ttft": ("ttft", 50)}
OF_RATES: Compared = {"tpot": ("tpot", 50), "ttft_p95": ("ttft", 95)}


class LoadChecker:
    """Answers recorded prompts live, autoregressively and under each of `configurations`, and
    simulates the same requests with step times of the same minutes."""

    def __init__(
        self,
        pair: Pair,
        replay: Replay,
        configurations: Sequence[Configuration],
        limits: Limits | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.replay, self.observer = replay, observer or Observer()
        self.configurations = list({c.id: c for c in (AUTOREGRESSIVE, *configurations)}.values())
        traffic = Traffic.of(Workload(clients=CLIENTS), replay.recording)
        self.traffic = replace(traffic, limits=limits or traffic.limits)
        self.timer = EngineTimer(pair, self.traffic)
        self.observer.stage("measuring steps")
        slots = self.traffic.limits.slots
        self._steps = StepMeasurer(pair, slots)
        self._steps.measure()
        self._runs = engine_runs(pair, self._steps.measured().times, slots, self.observer)

    def with_clients(self, clients: Sequence[int] = CLIENTS, repeats: int = 3) -> pd.DataFrame:
        """Answer the prompts with 1, 4, … clients. Returns one row a number of clients and
        configuration: tokens a second, median TPOT and median TTFT, live (medians of the repeats)
        and simulated (`_simulated`), and the simulation's relative errors (`_error`)."""
        stages = len(clients) * repeats * len(self.configurations)
        self.observer.stage("answering prompts", stages)
        rows = []
        for load in map(_closed, clients):
            for configuration in self.configurations:
                self.timer.warm_up(configuration, load)
            loads = {each.id: load for each in self.configurations}
            for _, row in self._compare(loads, OF_CLIENTS, repeats):
                rows.append({"clients": load.clients} | row)
        return pd.DataFrame(rows)

    def at_rates(
        self, shares: Sequence[float] = SHARES, number: int = REQUESTS, repeats: int = 3
    ) -> pd.DataFrame:
        """Measure the rate that keeps all slots busy under each configuration, and answer `number`
        requests that arrive at random at shares of that rate; simulated requests arrive at the same
        times. Returns one row a share and configuration as :meth:`with_clients` does, with the 95th
        percentile of TTFT."""
        stages = len(self.configurations) * (1 + len(shares) * repeats)
        self.observer.stage("answering requests that come at random", stages)
        capacity = {each.id: self._capacity(each) for each in self.configurations}
        rows = []
        for share in shares:
            loads = {
                config_id: Load(rate=share * rate, requests=number)
                for config_id, rate in capacity.items()
            }
            for load, row in self._compare(loads, OF_RATES, repeats):
                rows.append({"share": share, "rate": load.rate, "requests": number} | row)
        return pd.DataFrame(rows)

    def _compare(
        self, loads: Mapping[str, Load], compared: Compared, repeats: int
    ) -> Iterator[tuple[Load, dict[str, object]]]:
        """Each configuration's load, by configuration id: interleaved live runs against the
        simulation."""
        live: dict[str, list[LoadMeasures]] = {config_id: [] for config_id in loads}
        self._steps.forget()
        for _ in range(repeats):
            for configuration in self.configurations:
                self._steps.measure()
                records = self.timer.answer(configuration, loads[configuration.id])
                live[configuration.id].append(measure(records))
                self.observer.step()
        times, labels = self._steps.measured(self._runs).times, distinct_labels(self.configurations)
        for configuration in self.configurations:
            load, limits = loads[configuration.id], self.traffic.limits
            traffic = replace(self.traffic, limits=limits.verifying(configuration.candidates))
            costs = StepCosts(replayed_answers(self.replay, configuration), times)
            simulated = traffic.simulate(costs, load).measure()
            label = {"configuration": labels[configuration.id]}
            yield load, label | simulation_errors(simulated, live[configuration.id], compared)

    def _capacity(self, configuration: Configuration) -> float:
        """Requests a second that are answered while all slots are busy (Little's law)."""
        load = _closed(self.traffic.limits.slots)
        self.timer.warm_up(configuration, load)
        records = self.timer.answer(configuration, load)
        self.observer.step()
        return self.traffic.limits.slots / float((records["last"] - records["sent"]).mean())


def _closed(clients: int) -> Load:
    return Load(clients=clients, requests=max(_EACH * clients, _LEAST))


def simulation_errors(
    simulated: LoadMeasures, live: Sequence[LoadMeasures], compared: Compared
) -> dict[str, object]:
    """Three columns for tokens a second and for each of the `compared` latencies: the median of the
    live runs, the simulated value, and its relative error."""
    values = {
        "tokens_per_second": (
            median(run.tokens_per_second for run in live),
            simulated.tokens_per_second,
        )
    }
    for name, of in compared.items():
        values[name] = median(run.value(*of) for run in live), simulated.value(*of)
    columns: dict[str, object] = {}
    for name, (measured, expected) in values.items():
        columns[name], columns[f"{name}_simulated"] = measured, expected
        columns[f"{name}_error"] = expected / measured - 1
    return columns
