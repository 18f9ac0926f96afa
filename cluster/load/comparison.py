"""Servers under the same loads, interleaved. Each server is started again for every group of loads
(:attr:`LoadPlan.groups`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import comb
from time import sleep

from cluster.load.client import run_load
from cluster.load.cores import Cores, on_cores
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.evidence.load.plan import LoadPlan
from specdec_core.evidence.load.result import DISTURBANCE, LoadRow
from specdec_core.measure.paired import Paired
from specdec_core.measure.parts import Parts
from specdec_core.search.load.race import EndedUnderLoad, LoadContestant, LoadRace
from specdec_core.search.load.records import LoadRecord, LoadRequest, LoadRun
from specdec_core.search.load.workload import Load
from specdec_core.servers.process import ServerProcess, running

ENDING = 1.0  # seconds after which a server that fails requests has ended, if it does


@dataclass(frozen=True)
class ServerContestant:
    """A row, and its server for up to a number of requests together. A server that is not `needed`
    is left out where it does not start. Where it fails later, the rest of its requests count as
    failed."""

    row: LoadRow
    server: Callable[[int], ServerProcess]
    needed: bool = True

    def answer(
        self, plan: LoadPlan, workload: Sequence[LoadRequest], cores: Cores, loads: Sequence[Load]
    ) -> Iterator[tuple[Load, LoadRun]]:
        """Start the server, warm it up with prompts that are not measured, and send the measured
        ones of each load. Errors are as of a :class:`LoadContestant`."""
        clients = max(map(plan.warm_up, loads))
        server = self.server(max(map(plan.together, loads)))
        with running(server) as url, on_cores(cores.client):
            run_load(url, workload[:clients], clients)
            for load in loads:
                run = run_load(url, plan.requests_of(load, workload), load.clients)
                if any(record.error for record in run):
                    sleep(ENDING)
                    try:
                        server.check()
                    except UserError as error:
                        raise EndedUnderLoad(str(error)) from error
                yield load, run


def compare_servers(
    plan: LoadPlan,
    contestants: Sequence[ServerContestant],
    workload: Sequence[LoadRequest],
    cores: Cores,
    parts: Parts[LoadRecord],
    observer: Observer | None = None,
    leave: bool = False,
) -> list[LoadRow]:
    """The contestants' rows with their records (:class:`LoadRace`). With `leave`, a contestant that
    is shown to be slower than another one under a load has no further runs under it; autoregressive
    decoding stays."""
    rows = {
        LoadContestant(
            each.row.name,
            each.row.key,
            partial(each.answer, plan, workload, cores),
            each.needed,
            each.row.runs,
        ): each.row
        for each in contestants
    }

    looks = max(plan.repeats - 1, 1)  # before each repeat but the first

    def slower(load: Load, racing: Sequence[LoadContestant]) -> set[str]:
        return shown_slower([rows[each] for each in racing], load, looks)

    race = LoadRace(
        plan.groups, plan.repeats, parts, observer or Observer(), slower if leave else None
    )
    entered = race.run([*rows], f"{len(rows)} servers, interleaved")
    return [rows[each] for each in entered]


def shown_slower(rows: Sequence[LoadRow], load: Load, looks: int) -> set[str]:
    """The names of the rows that another one without errors is shown to be faster than under a
    load, by the runs that they have, in a race that is looked at `looks` times: for all pairs and
    looks together (Bonferroni). By a single run, which may be disturbed as a whole, it must be
    faster by :data:`DISTURBANCE`."""
    ran = [row for row in rows if row.runs.get(load.key)]
    if not ran:
        return set()
    whole = [row for row in ran if not row.errors(load)]
    paces, pairs = {row.name: row.paces(load) for row in ran}, comb(len(ran), 2)
    paired = Paired(paces, looks=looks * max(pairs, 1))

    def slower(row: LoadRow, other: LoadRow) -> bool:
        both = min(len(each.runs[load.key]) for each in (row, other))
        return paired.ratio(other.name, row.name).low > (1 if both > 1 else DISTURBANCE)

    return {
        row.name
        for row in ran
        if not row.autoregressive and any(slower(row, other) for other in whole)
    }
