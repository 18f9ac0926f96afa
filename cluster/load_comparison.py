"""Servers under the same loads, interleaved. Each server is started again for every group of loads
(:attr:`LoadPlan.groups`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from specdec_core.servers.process import ServerProcess, running

ENDING = 1.0  # seconds after which a server that fails requests has ended, if it does
DISTURBANCE = 1.3  # other programs slow a whole run down by less than this


class ServerEnded(UserError):
    """The process of a server has ended under a load."""


@dataclass(frozen=True)
class Contestant:
    """A row, and its server for up to a number of requests together. A server that is not `needed`
    is left out where it does not start. Where it fails later, the rest of its requests count as
    failed."""

    row: LoadRow
    server: Callable[[int], ServerProcess]
    needed: bool = True

    def measure(
        self, plan: LoadPlan, workload: Sequence[LoadRequest], loads: Sequence[Load], cores: Cores
    ) -> Iterator[tuple[Load, list[LoadRecord]]]:
        """Start the server, warm it up with prompts that are not measured, and send the measured
        ones of each load. Raises :class:`UserError` where the server does not start, or
        :class:`ServerEnded` in place of the load under which it ended."""
        clients = max(map(plan.warm_up, loads))
        server = self.server(max(map(plan.together, loads)))
        with running(server) as url, on_cores(cores.client):
            run_load(url, workload[:clients], clients)
            for load in loads:
                records = run_load(url, plan.requests_of(load, workload), load.clients)
                if any(record.error for record in records):
                    sleep(ENDING)
                    try:
                        server.check()
                    except UserError as error:
                        raise ServerEnded(str(error)) from error
                yield load, records


def compare_servers(
    plan: LoadPlan,
    contestants: Sequence[Contestant],
    workload: Sequence[LoadRequest],
    cores: Cores,
    parts: Parts[LoadRecord],
    observer: Observer | None = None,
    leave: bool = False,
) -> list[LoadRow]:
    """The contestants' rows with their records. All answer the same group of loads before the next
    one begins; the first contestant changes with the group, and the first load with the repeat.
    With `leave`, a contestant that is shown to be slower than another one under a load has no
    further runs under it; autoregressive decoding stays. A server that ends under a load has no
    further runs under it. Runs in `parts` are not repeated, and new runs are kept in `parts`.
    Raises :class:`UserError` where a needed server does not start, or with `leave`, which compares
    all with it, where it ends."""
    observer = observer or Observer()
    race = _Race(plan, workload, cores, parts, observer, leave)
    entered = list(contestants)
    turns = [group for _ in range(plan.repeats) for group in plan.groups]
    runs = len(entered) * plan.repeats * len(plan.loads)
    observer.stage(f"{len(entered)} servers, interleaved", runs, done=len(parts.times))
    for turn, group in enumerate(turns):
        racing = [each.row for each in entered]
        slower = {load: race.slower(racing, load) for load in group}
        for contestant in interleaved(entered, turn):
            loads = [load for load in group if contestant.row.name not in slower[load]]
            for _ in range(len(group) - len(loads)):
                observer.step()
            first = turn // len(plan.groups) % max(len(loads), 1)
            started = race.answer(contestant, turn, [*loads[first:], *loads[:first]])
            if not started:
                entered.remove(contestant)
                for _ in range(sum(map(len, turns[turn + 1 :]))):
                    observer.step()
    return [contestant.row for contestant in entered]


@dataclass
class _Race:
    """A running comparison."""

    plan: LoadPlan
    workload: Sequence[LoadRequest]
    cores: Cores
    parts: Parts[LoadRecord]
    observer: Observer
    leave: bool
    ended: dict[tuple[str, str], str] = field(default_factory=dict)  # reasons, by row and load

    def slower(self, rows: Sequence[LoadRow], load: Load) -> set[str]:
        """The names of the rows that have no further runs under a load."""
        if not self.leave:
            return set()
        return shown_slower([r for r in rows if (r.name, load.key) not in self.ended], load)

    def answer(self, contestant: Contestant, turn: int, loads: Sequence[Load]) -> bool:
        """Add a run under each load to the contestant's row. False where its server does not start
        and has not run before."""
        row, missing = contestant.row, list[Load]()
        for load in loads:
            if (records := self.parts.get(self._run(turn, load), row)) is not None:
                self._add(row, load, records)
            elif (row.name, load.key) in self.ended:
                self._add_failed(row, load)
            else:
                missing.append(load)
        while missing:
            try:
                for load, records in contestant.measure(
                    self.plan, self.workload, tuple(missing), self.cores
                ):
                    missing.remove(load)
                    self.parts.keep(self._run(turn, load), row, records)
                    self._add(row, load, records)
                    self.observer.step()
            except UserError as error:
                under_load = isinstance(error, ServerEnded)
                if contestant.needed and (self.leave or not under_load):
                    raise
                self.observer.warned(f"without {row.name}: {error}")
                failed = missing[:1] if under_load else missing
                if not (under_load or row.runs):
                    for _ in failed:
                        self.observer.step()
                    return False
                for load in failed:
                    self.ended[row.name, load.key] = str(error)
                    self._add_failed(row, load)
                missing = missing[len(failed) :]
        return True

    def _run(self, turn: int, load: Load) -> int:
        """The number of a run among all of a row."""
        return turn // len(self.plan.groups) * len(self.plan.loads) + self.plan.loads.index(load)

    def _add(self, row: LoadRow, load: Load, records: list[LoadRecord]) -> None:
        row.runs.setdefault(load.key, []).append(records)

    def _add_failed(self, row: LoadRow, load: Load) -> None:
        """A run of failed requests, because the server ends under the load."""
        reason = self.ended[row.name, load.key]
        self._add(
            row, load, [LoadRecord(index=n, sent=0, error=reason) for n in range(load.requests)]
        )
        self.observer.step()


def shown_slower(rows: Sequence[LoadRow], load: Load) -> set[str]:
    """The names of the rows that another one without errors is shown to be faster than under a
    load, by the runs that they have. By a single run, which may be disturbed as a whole, it must be
    faster by :data:`DISTURBANCE`."""
    ran = [row for row in rows if row.runs.get(load.key)]
    whole = [row for row in ran if not row.errors(load)]

    def slower(row: LoadRow, other: LoadRow) -> bool:
        both = min(len(each.runs[load.key]) for each in (row, other))
        return over(other, row, load).low > (1 if both > 1 else DISTURBANCE)

    return {
        row.name
        for row in ran
        if not row.autoregressive and any(slower(row, other) for other in whole)
    }
