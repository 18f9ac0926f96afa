"""Simulated speeds of a server's settings, corrected by first runs of some of them.

A profile has the times of a server's steps. While it serves, each step takes longer: its processes
exchange messages, and answers are streamed. By how much depends on how it drafts and on the load.
The seconds a token of a configuration are t + δ·r: t is simulated, r are its rounds a token, and δ
is what a round of its family took longer than simulated, under this load, in the first runs.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from specdec_core.config import Configuration
from specdec_core.evidence.server_choice import ServerRace
from specdec_core.search.estimates import LEAST
from specdec_core.search.load.simulated import Simulated
from specdec_core.servers.server import Mode


def as_served(simulated: Simulated, first: ServerRace, modes: Mapping[str, Mode]) -> Simulated:
    """`simulated` at the speeds of the server while it serves, by its `first` runs. `modes` are
    the modes of the simulated configurations, by the configurations' ids; the rows have the modes'
    names. A family without a run takes longer by what autoregressive decoding does."""
    rows = {row.name: row for row in first.rows}
    known = {key: mode for key, mode in modes.items() if key in simulated.known}
    families = pd.Series({key: _family(simulated.known[key], mode) for key, mode in known.items()})
    speeds: dict[str, pd.Series] = {}
    for load in simulated.traffic.loads:
        assert load.clients is not None  # a server is swept at numbers of clients
        at = next(each for each in first.loads if each.key == load.key)
        table = simulated.at(load).loc[list(simulated.known)]
        seconds = load.clients / table["tokens_per_second"]
        rounds = seconds * table["steps"] / table["seconds"]
        served = {
            key: load.clients / row.tokens_per_second(at)
            for key, mode in known.items()
            if (row := rows.get(mode.name)) is not None and not row.errors(at)
        }
        taken = pd.Series(served, dtype=float)
        beyond = ((taken - seconds) / rounds)[taken.index].groupby(families).mean()
        own = families.map(beyond).reindex(seconds.index)
        own = own.fillna(beyond.get(_family(simulated.baseline), 0.0))
        corrected = (seconds + own * rounds).clip(lower=LEAST * seconds)
        speeds[load.label] = load.clients / corrected
    return simulated.at_speeds(speeds)


def _family(configuration: Configuration, mode: Mode | None = None) -> str:
    """Configurations of a family have the same cost beside their forwards. A plug-in's have other
    ones than the server's own."""
    by = "plug-in" if mode is not None and mode.plug_in is not None else "server"
    return f"{configuration.family} by {by}"
