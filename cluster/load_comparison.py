"""Servers under the same load, in turns: each is started anew for every load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.serving.load_client import run_load
from cluster.serving.server_process import Cores, Server, on_cores, running
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.studies.load.plan import LoadPlan
from specdec_core.studies.load.requests import LoadRecord, LoadRequest
from specdec_core.studies.load.result import LoadRow


@dataclass(frozen=True)
class Contestant:
    """A row, and its server for up to a number of requests together. One that is not `needed` may
    fail to start: it is left out then, with a warning."""

    row: LoadRow
    server: Callable[[int], Server]
    needed: bool = True


def compare_servers(
    plan: LoadPlan,
    contestants: Sequence[Contestant],
    workload: Sequence[LoadRequest],
    cores: Cores,
    observer: Observer | None = None,
) -> list[LoadRow]:
    """The contestants' rows with their records. All answer the same load before the next one comes,
    each time another one first. Raises :class:`UserError` where a server that is needed does not
    start."""
    observer = observer or Observer()
    entered = list(contestants)
    loads = [(repeat, clients) for repeat in range(plan.repeats) for clients in plan.clients]
    observer.stage(f"{len(entered)} servers in turns", len(entered) * len(loads))
    for turn, (_, clients) in enumerate(loads):
        shift = turn % len(entered)
        for contestant in [*entered[shift:], *entered[:shift]]:
            try:
                records = measure(plan, contestant, workload, clients, cores)
            except UserError as error:
                if contestant.needed:
                    raise
                observer.warned(f"without {contestant.row.name}: {error}")
                entered.remove(contestant)
            else:
                contestant.row.runs.setdefault(clients, []).append(records)
            observer.step()
    return [contestant.row for contestant in entered]


def measure(
    plan: LoadPlan,
    contestant: Contestant,
    workload: Sequence[LoadRequest],
    clients: int,
    cores: Cores,
) -> list[LoadRecord]:
    """Start a server, warm it up with prompts that are not measured, and put it under load."""
    warm_up = workload[:clients]
    measured = workload[plan.warm_up :][: plan.count(clients)]
    with running(contestant.server(plan.slots or clients)) as url, on_cores(cores.client):
        run_load(url, warm_up, clients)
        return run_load(url, measured, clients)
