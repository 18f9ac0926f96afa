"""Configurations simulated at each load, and a drafter for each range of load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration, DrafterSettings
from specdec_core.cost.steps import StepTimes
from specdec_core.drafting.schedule.settings import ScheduleSettings
from specdec_core.recordings.replay import Replay
from specdec_core.search.load.answers import replayed_answers
from specdec_core.search.load.decoded import decoded_live
from specdec_core.search.load.step_costs import StepCosts
from specdec_core.search.load.traffic import Traffic
from specdec_core.search.load.workload import Objective, Workload

TOLERANCE = 0.01  # a change of configuration has to gain more than this share


def simulate_each(
    replay: Replay,
    configurations: Sequence[Configuration],
    times: StepTimes,
    workload: Workload,
    observer: Observer | None = None,
) -> pd.DataFrame:
    """Every configuration, and autoregressive decoding, at every load of a workload. One row each:
    `load`, its label; `clients`, 0 of an open loop; `config_id`; `decoded_live`, whether its rounds
    were decoded rather than replayed; `tokens_per_second`, `request_speed`, `goodput` and medians
    of `ttft` and `tpot` (see :class:`~specdec_core.search.load.measures.LoadMeasures`), the
    `seconds` that were simulated and those that it `took`. Raises :class:`UserError` for a
    configuration without known rounds."""
    traffic = Traffic.of(workload, replay.recording)
    baseline = AUTOREGRESSIVE.model_copy(update={"sampling": replay.header.sampling})
    distinct = {each.id: each for each in (baseline, *configurations)}
    observer = observer or Observer()
    observer.stage("simulating load", len(distinct))
    rows = []
    for config_id, configuration in distinct.items():
        costs = StepCosts(replayed_answers(replay, configuration), times)
        live = decoded_live(replay, configuration)
        for load in traffic.loads:
            simulation = traffic.simulate(costs, load)
            measures = simulation.measure(workload.slo)
            rows.append(
                {
                    "load": load.label,
                    "clients": load.clients or 0,
                    "config_id": config_id,
                    "decoded_live": live,
                    "tokens_per_second": measures.tokens_per_second,
                    "request_speed": measures.request_speed,
                    "goodput": measures.goodput,
                    "ttft": measures.value("ttft", 50),
                    "tpot": measures.value("tpot", 50) if measures.tpot else float("nan"),
                    "seconds": simulation.seconds,
                    "took": simulation.took,
                }
            )
        observer.step()
    return pd.DataFrame(rows)


def choose_schedule(
    simulated: pd.DataFrame,
    configurations: Sequence[Configuration],
    by: Objective = "tokens_per_second",
    tolerance: float = TOLERANCE,
) -> Configuration:
    """The best configuration for each number of clients in what :func:`simulate_each` returns, as
    one that can be served (:func:`scheduled`). The one for fewer clients is kept where no other
    gains more than `tolerance`."""
    known = {each.id: each for each in configurations}
    best: dict[int, Configuration] = {}
    kept: str | None = None
    for clients, rows in simulated.groupby("clients"):
        value = rows.set_index("config_id")[by]
        leader = str(value.idxmax())
        if kept is None or value[leader] > (1 + tolerance) * value[kept]:
            kept = leader
        best[int(str(clients))] = known[kept]
    return scheduled(best)


def scheduled(best: Mapping[int, Configuration]) -> Configuration:
    """One configuration that drafts as `best[n]` for up to n requests, down to one more than the
    number before n, and as the last one for more. It is that itself where all draft alike. All have
    to sample alike."""
    if len({each.sampling for each in best.values()}) > 1:
        raise ValueError("the configurations of a schedule must sample alike")
    ranges: dict[int, DrafterSettings | None] = {}
    least = 1
    for requests, configuration in sorted(best.items()):
        if not ranges or ranges[max(ranges)] != configuration.drafter:
            ranges[least] = configuration.drafter
        least = requests + 1
    any_of = next(iter(best.values()))
    if len(ranges) == 1:
        return any_of
    return any_of.model_copy(update={"drafter": ScheduleSettings(ranges=ranges)})


def drafter_at(configuration: Configuration, requests: int) -> DrafterSettings | None:
    """The drafter when `requests` requests are decoded together."""
    drafter = configuration.drafter
    return drafter.at(requests) if isinstance(drafter, ScheduleSettings) else drafter
