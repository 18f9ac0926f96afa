"""Servers under the same load, interleaved. Each server is started again for every load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import sleep

from cluster.serving.cores import Cores, on_cores
from cluster.serving.load_client import run_load
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.evidence.load.plan import LoadPlan
from specdec_core.evidence.load.requests import LoadRecord, LoadRequest
from specdec_core.evidence.load.result import LoadRow
from specdec_core.evidence.parts import Parts
from specdec_core.measure.comparison import interleaved, over
from specdec_core.search.load.workload import Load
from specdec_core.servers.process import StartableServer, running

ENDING = 1.0  # seconds after which a server that fails requests has ended, if it does


class ServerEnded(UserError):
    """The process of a server has ended under a load."""


@dataclass(frozen=True)
class Contestant:
    """A row, and its server for up to a number of requests together. A server that is not `needed`
    is left out where it does not start. Where it fails later, the rest of its requests count as
    failed."""

    row: LoadRow
    server: Callable[[int], StartableServer]
    needed: bool = True

    def measure(
        self, plan: LoadPlan, workload: Sequence[LoadRequest], load: Load, cores: Cores
    ) -> list[LoadRecord]:
        """Start the server, warm it up with prompts that are not measured, and send the measured
        ones. Raises :class:`UserError` where the server does not start, or
        :class:`ServerEnded`."""
        clients, server = plan.warm_up(load), self.server(plan.together(load))
        with running(server) as url, on_cores(cores.client):
            run_load(url, workload[:clients], clients)
            records = run_load(url, plan.requests_of(load, workload), load.clients)
            if any(record.error for record in records):
                sleep(ENDING)
                try:
                    server.check()
                except UserError as error:
                    raise ServerEnded(str(error)) from error
            return records


def compare_servers(
    plan: LoadPlan,
    contestants: Sequence[Contestant],
    workload: Sequence[LoadRequest],
    cores: Cores,
    parts: Parts[LoadRecord],
    observer: Observer | None = None,
    leave: bool = False,
) -> list[LoadRow]:
    """The contestants' rows with their records. All answer the same load before the next one
    begins; the first contestant changes with the load. With `leave`, a contestant that is shown to
    be slower than another one under a load has no further runs under it; autoregressive decoding
    stays. A server that ends under a load has no further runs under it. Runs in `parts` are not
    repeated, and new runs are kept in `parts`. Raises :class:`UserError` where a needed server does
    not start, or with `leave`, which compares all with it, where it ends."""
    observer = observer or Observer()
    entered, ended = list(contestants), dict[tuple[str, str], str]()
    turns = [load for _ in range(plan.repeats) for load in plan.loads]
    runs = len(entered) * len(turns)
    observer.stage(f"{len(entered)} servers, interleaved", runs, done=len(parts.times))
    for turn, load in enumerate(turns):
        racing = [each.row for each in entered if (each.row.name, load.key) not in ended]
        slower = shown_slower(racing, load) if leave else set()
        for contestant in interleaved(entered, turn):
            row, place = contestant.row, (contestant.row.name, load.key)
            if row.name in slower:
                observer.step()
                continue
            records = parts.get(turn, row)
            if records is None and place not in ended:
                try:
                    records = contestant.measure(plan, workload, load, cores)
                except UserError as error:
                    if contestant.needed and (leave or not isinstance(error, ServerEnded)):
                        raise
                    observer.warned(f"without {row.name}: {error}")
                    if not (row.runs or isinstance(error, ServerEnded)):
                        entered.remove(contestant)
                        for _ in turns[turn:]:
                            observer.step()
                        continue
                    ended[place] = str(error)
                else:
                    parts.keep(turn, row, records)
                    observer.step()
            if records is None:
                observer.step()
                reason = ended[place]
                records = [LoadRecord(index=n, sent=0, error=reason) for n in range(load.requests)]
            row.runs.setdefault(load.key, []).append(records)
    return [contestant.row for contestant in entered]


def shown_slower(rows: Sequence[LoadRow], load: Load) -> set[str]:
    """The names of the rows that another one without errors is shown to be faster than under a
    load, by the runs that they have: at least two, because a single run may be disturbed as a
    whole."""
    ran = [row for row in rows if len(row.runs.get(load.key, [])) >= 2]
    whole = [row for row in ran if not row.errors(load)]
    return {
        row.name
        for row in ran
        if not row.autoregressive and any(over(other, row, load).low > 1 for other in whole)
    }
