"""Servers under the same load, interleaved. Each server is started again for every load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.serving.load_client import run_load
from cluster.serving.server_process import Cores, StartableServer, on_cores, running
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.evidence.load.plan import LoadPlan
from specdec_core.evidence.load.requests import LoadRecord, LoadRequest
from specdec_core.evidence.load.result import LoadRow
from specdec_core.evidence.parts import Parts
from specdec_core.measure.comparison import interleaved
from specdec_core.search.load.workload import Load


@dataclass(frozen=True)
class Contestant:
    """A row, and its server for up to a number of requests together. A server that is not `needed`
    may fail to start: it is left out then, with a warning."""

    row: LoadRow
    server: Callable[[int], StartableServer]
    needed: bool = True

    def measure(
        self, plan: LoadPlan, workload: Sequence[LoadRequest], load: Load, cores: Cores
    ) -> list[LoadRecord]:
        """Start the server, warm it up with prompts that are not measured, and send the measured
        ones."""
        clients = plan.warm_up(load)
        with running(self.server(plan.together(load))) as url, on_cores(cores.client):
            run_load(url, workload[:clients], clients)
            return run_load(url, plan.requests_of(load, workload), load.clients)


def compare_servers(
    plan: LoadPlan,
    contestants: Sequence[Contestant],
    workload: Sequence[LoadRequest],
    cores: Cores,
    parts: Parts[LoadRecord],
    observer: Observer | None = None,
) -> list[LoadRow]:
    """The contestants' rows with their records. All answer the same load before the next one
    begins; the first contestant changes with the load. Runs in `parts` are not repeated, and new
    runs are kept in `parts`. Raises :class:`UserError` where a needed server does not start."""
    observer = observer or Observer()
    entered = list(contestants)
    turns = [load for _ in range(plan.repeats) for load in plan.loads]
    runs = len(entered) * len(turns)
    observer.stage(f"{len(entered)} servers, interleaved", runs, done=len(parts.times))
    for turn, load in enumerate(turns):
        for contestant in interleaved(entered, turn):
            records = parts.get(turn, contestant.row)
            if records is None:
                try:
                    records = contestant.measure(plan, workload, load, cores)
                except UserError as error:
                    if contestant.needed:
                        raise
                    observer.warned(f"without {contestant.row.name}: {error}")
                    entered.remove(contestant)
                    continue
                parts.keep(turn, contestant.row, records)
                observer.step()
            contestant.row.runs.setdefault(load.key, []).append(records)
    return [contestant.row for contestant in entered]
