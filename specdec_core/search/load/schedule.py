"""A schedule: a drafter for each range of load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pandas as pd

from specdec_core.config import Configuration, DrafterSettings
from specdec_core.drafting.schedule.settings import ScheduleSettings
from specdec_core.search.load.workload import Objective

TOLERANCE = 0.01  # a change of configuration has to gain more than this share


def choose_schedule(
    simulated: pd.DataFrame,
    configurations: Iterable[Configuration],
    by: Objective = "tokens_per_second",
    tolerance: float = TOLERANCE,
) -> Configuration:
    """The best configuration for each number of clients in a table of simulations
    (:class:`~specdec_core.search.load.simulated.Simulated`), as one that can be served
    (:func:`scheduled`). The one for fewer clients is kept where no other gains more than
    `tolerance`, and autoregressive decoding gains nothing."""
    known = {each.id: each for each in configurations}
    best: dict[int, Configuration] = {}
    kept: str | None = None
    for clients, rows in simulated.groupby("clients"):
        value = rows.set_index("config_id")[by]
        leader = str(value.idxmax())
        gain = 0.0 if known[leader].drafter is None else tolerance
        if kept is None or value[leader] > (1 + gain) * value[kept]:
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
