"""The settings of a server that a sweep compares, the finalists among them, and the champion."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pandas as pd

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, Stored, distinct_labels
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.evidence.load.result import LoadResult, LoadRow
from specdec_core.measure.comparison import EVERYTHING, FOLDS, OURS, Crossed, Requests, folds, over
from specdec_core.search.load.choice import finalists_at
from specdec_core.search.load.schedule import choose_schedule
from specdec_core.search.load.simulated import Simulated
from specdec_core.search.load.workload import LiveSettings, Load
from specdec_core.servers.server import Mode, Models, Server

LOSS = 0.05  # the share of its speed that a champion may lose at a load: a race shows no less
MARGIN = 0.1  # the share that a contender may lose by the corrected simulation, which is less sure
CONTENDERS = 2  # at least, if as many are near the best


class ServerRace(LoadResult):
    """A server in several modes under load."""

    def autoregressive(self, group: str = OURS) -> LoadRow:
        return next(row for row in self.rows if row.autoregressive)

    def with_other_texts(self) -> set[str]:
        """The names of the rows that cannot win, by :meth:`unequal`."""
        return {row.name for _, row in self.unequal() if not row.autoregressive}

    def may_win(self) -> list[LoadRow]:
        """The rows that the champion is chosen among."""
        left_out = self.with_other_texts()
        return [row for row in self.rows if row.name not in left_out]


class ServerSweep(Stored):
    """The result of a sweep of a server. Modes are named by their rows in the race, loads are given
    by their keys. `first` has the runs that corrected the simulation, if there were some."""

    FILE: ClassVar[str] = "server.json"
    WHAT: ClassVar[str] = "sweep of a server"

    server: str
    title: str
    race: ServerRace
    first: ServerRace | None = None
    configurations: dict[str, Configuration]  # of the modes, where they are known
    expected: dict[str, dict[str, float]]  # tokens a second by simulation, by mode and load
    ranked: int  # settings that were ranked
    left_out: list[str]  # configurations without settings
    recording: str
    others_raced: bool = False  # whether the race has other prompts than the recording
    times: str  # the device of the step costs
    best: dict[str, str]  # the fastest mode, by load
    champion: str
    usage: str  # the lines that start the champion from its folder
    command: str  # that started it in the race, on a shown port
    mlflow_run_id: str | None = None

    @property
    def configuration(self) -> Configuration | None:
        """The champion's; None for a mode of the server that no configuration stands for."""
        return self.configurations.get(self.champion)

    @property
    def winner(self) -> LoadRow:
        """The champion's row."""
        return next(row for row in self.race.rows if row.name == self.champion)

    @property
    def crossed(self) -> Crossed[LoadRow]:
        """What would be the champion without each of the :func:`folds`."""
        rows, loads = self.race.may_win(), self.race.loads
        return Crossed([best_of_all(rows, loads, without) for without in range(FOLDS)])


@dataclass(frozen=True)
class Expressed:
    """The modes of a server for the configurations of a plan, by the configurations' ids, those
    without a mode, and lines on what modes would need that is not installed and on drafts that the
    server cannot load."""

    modes: Mapping[str, Mode]
    left_out: Sequence[Configuration]
    missing: Sequence[str]


def express(server: Server, models: Models, configurations: Iterable[Configuration]) -> Expressed:
    """The modes for `configurations` that draft: with the server's own settings, or else with our
    plug-in, which has to get the costs that they ask for. Lookups are changed to copy after the
    occurrence that the server's copy after, unless it has settings for both. Of configurations with
    the same settings the first one counts."""
    distinct = {
        (c := _as_there(server, each)).id: c for each in configurations if each.drafter is not None
    }
    names = distinct_labels(distinct.values())
    modes: dict[str, Mode] = {}
    left_out, missing = [], dict[str, None]()
    for each in distinct.values():
        mode, reason = server.find_mode(each, models, names[each.id])
        if mode is None:
            left_out.append(each)
            for draft, file in each.drafts_of(models.drafts).items():
                if file.refused is not None:
                    missing[f"draft {draft}: {file.refused}"] = None
            continue
        if reason is not None:
            missing[reason] = None
        if mode.plug_in or all(mode.settings != other.settings for other in modes.values()):
            modes[each.id] = mode
    return Expressed(modes, left_out, list(missing))


def _as_there(server: Server, configuration: Configuration) -> Configuration:
    drafter = configuration.drafter
    if isinstance(drafter, PromptLookupSettings) and not server.both_occurrences:
        drafter = drafter.model_copy(update={"occurrence": server.occurrence})
    return configuration.model_copy(update={"drafter": drafter})


def finalists(simulated: Simulated, modes: Mapping[str, Mode], live: LiveSettings) -> list[Mode]:
    """The modes of the first runs: the best few at each load, each once."""
    chosen: dict[str, Mode] = {}
    for load in simulated.traffic.loads:
        values, first = simulated.values(load), simulated.choice(load)
        for each in finalists_at(values, simulated.known.values(), first.id, live):
            chosen[each.id] = modes[each.id]
    return list(chosen.values())


def contenders(simulated: Simulated, modes: Mapping[str, Mode], live: LiveSettings) -> list[Mode]:
    """The modes that may be the fastest over all loads, by a simulation that was corrected: a few
    of the best by the geometric mean of their speeds. One that loses more than :data:`MARGIN` to
    autoregressive decoding at some load is none; a table by load may have it at another load."""
    speeds = pd.DataFrame({load.key: simulated.values(load) for load in simulated.traffic.loads})
    least = (1 - MARGIN) * speeds.loc[simulated.baseline.id]
    overall = np.exp(np.log(speeds[(speeds >= least).all(axis=1)]).mean(axis=1))
    few = live.model_copy(update={"finalists": max(live.finalists, CONTENDERS)})
    best = finalists_at(overall, simulated.known.values(), str(overall.idxmax()), few)
    return [modes[each.id] for each in best]


def defaults(modes: Sequence[Mode]) -> list[Mode]:
    """Of a server's own modes, those that finalists are raced beside: without a draft all, and the
    first one of each draft. The plan has further lengths, if they are wanted."""
    first = {mode.draft: mode for mode in reversed(modes)}
    return [mode for mode in modes if mode.draft is None or mode is first[mode.draft]]


def joined(modes: Sequence[Mode], more: Iterable[Mode]) -> list[Mode]:
    """`modes`, and the modes of `more` with other settings or another configuration in the
    plug-in."""
    both = list(modes)
    for mode in more:
        way = mode.settings, mode.plug_in
        if all(way != (each.settings, each.plug_in) for each in both):
            both.append(mode)
    return both


def after_first_runs(
    modes: Sequence[Mode],
    own: Sequence[Mode],
    rows: Sequence[LoadRow],
    loads: Sequence[Load],
    chosen: Iterable[Mode],
) -> list[Mode]:
    """The modes of the race, after first runs of `modes`, which have `rows`: of the server's `own`
    autoregressive decoding and the fastest that drafts, and those that the corrected simulation has
    `chosen`. One that did not start has no row, and is not started again."""
    drafting = {mode.name for mode in own if not mode.autoregressive}
    speeds = {
        row.name: math.prod(row.tokens_per_second(load) for load in loads)
        for row in rows
        if row.name in drafting and not any(map(row.errors, loads))
    }
    best = max(speeds, key=lambda name: speeds[name], default=None)
    ended = {mode.name for mode in modes} - {row.name for row in rows}
    kept = [mode for mode in own if mode.autoregressive or mode.name == best]
    return joined(kept, [mode for mode in chosen if mode.name not in ended])


def best_at(rows: Sequence[LoadRow], load: Load) -> LoadRow:
    """The fastest row at a load, by its ratio to autoregressive decoding in the same runs: a row
    that was soon slower has fewer."""
    plain = next(row for row in rows if row.autoregressive)
    whole = [row for row in rows if not row.errors(load)]
    return max(whole, key=lambda row: over(row, plain, load).value)


def best_of_all(
    rows: Sequence[LoadRow], loads: Sequence[Load], without: int | None = None
) -> LoadRow:
    """The champion, by all requests or `without` one of their :func:`folds`: of the server's own
    modes the :func:`_fastest`, or a row with settings of ours that is faster and loses at most
    :data:`LOSS` to it at any load. Raises :class:`UserError` where requests of autoregressive
    decoding failed."""
    plain = next(row for row in rows if row.autoregressive)
    if failed := [load for load in loads if plain.errors(load)]:
        raise UserError(
            f"{plain.name}: requests failed with {failed[0]}, so nothing can be compared with it"
            f" (--fresh races again); the first said: {_error(plain, failed[0])}"
        )
    default = _fastest([row for row in rows if not row.with_ours], loads, plain, plain, without)
    return _fastest(rows, loads, plain, default, without)


def _fastest(
    rows: Iterable[LoadRow],
    loads: Sequence[Load],
    plain: LoadRow,
    default: LoadRow,
    without: int | None,
) -> LoadRow:
    """The fastest row over all loads, by the geometric mean of its ratios to `plain`. A row that is
    slower than `plain` or `default` by more than :data:`LOSS` at some load is left out."""

    def ratios(row: LoadRow, rival: LoadRow) -> list[float]:
        return [over(row, rival, at, _but(at, without)).value for at in loads]

    def may_win(row: LoadRow) -> bool:
        least = min(*ratios(row, plain), *ratios(row, default))
        return not any(map(row.errors, loads)) and least >= 1 - LOSS

    return max([default, *filter(may_win, rows)], key=lambda row: math.prod(ratios(row, plain)))


def _but(load: Load, without: int | None) -> Requests:
    return EVERYTHING if without is None else folds(load.requests)[without].choose


def by_load(
    server: Server,
    models: Models,
    simulated: Simulated,
    modes: Mapping[str, Mode],
    rows: Iterable[LoadRow],
) -> Mode | None:
    """The mode that drafts at each load as the best one that ran there does, by a simulation that
    was corrected by `rows`. `modes` are by the ids of configurations. None where one drafts best at
    all loads, or the server cannot be started so."""
    ran = {row.name for row in rows}
    known = [
        each
        for key, each in simulated.known.items()
        if each == simulated.baseline or modes[key].name in ran
    ]
    table = simulated.table[simulated.table["config_id"].isin([each.id for each in known])]
    chosen = choose_schedule(table, known)
    if chosen in known:
        return None
    mode = next(iter(express(server, models, [chosen]).modes.values()), None)
    # A schedule of the plan may have the same label.
    return mode and replace(mode, name=f"{mode.name}, best by load")


def _error(row: LoadRow, load: Load) -> str:
    return next(str(r.error) for run in row.of(load) for r in run if r.error is not None)
