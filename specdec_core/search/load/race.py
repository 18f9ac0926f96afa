"""A race under loads: contestants answer the same requests, interleaved, as long as they may win.

A contestant is this engine under a configuration, or a server in one of its modes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from specdec_core.base.errors import UserError
from specdec_core.base.names import plain_name
from specdec_core.base.observer import Observer
from specdec_core.measure.comparison import interleaved
from specdec_core.measure.parts import Parts
from specdec_core.search.load.records import LoadRecord, LoadRun
from specdec_core.search.load.workload import Load


class EndedUnderLoad(UserError):
    """A contestant has ended under a load."""


@dataclass(eq=False)
class LoadContestant:
    """`answer` yields a run of each load, in their order. It raises :class:`UserError` where the
    contestant does not start, or :class:`EndedUnderLoad` in place of the load under which it ended.
    A contestant that is not `needed` is left out where it does not start. `key` identifies it in
    the names of files."""

    name: str
    key: str
    answer: Callable[[Sequence[Load]], Iterable[tuple[Load, LoadRun]]]
    needed: bool = True
    runs: dict[str, list[LoadRun]] = field(default_factory=dict)  # by the load's key
    ended: dict[str, str] = field(default_factory=dict)  # reasons, by the load's key

    def add(self, load: Load, run: LoadRun) -> None:
        self.runs.setdefault(load.key, []).append(run)


# The names of the contestants that shall have no further runs under a load, by the runs so far.
Leaving = Callable[[Load, Sequence[LoadContestant]], Collection[str]]


@dataclass(frozen=True)
class LoadRace:
    """In each of `repeats` repeats all contestants answer a group of loads before the next group
    comes. The order of the contestants changes with the group and the repeat, the first load of a
    group with the repeat.

    A contestant has no further runs under a load once `leaving` names it; unset, all have every
    run. Runs in `parts` are not repeated, and new runs are kept in `parts`, named by load, repeat
    and contestant."""

    groups: Sequence[Sequence[Load]]
    repeats: int
    parts: Parts[LoadRecord]
    observer: Observer
    leaving: Leaving | None = None

    def run(self, contestants: Sequence[LoadContestant], stage: str) -> list[LoadContestant]:
        """Add the runs to the contestants, and return those that started. A contestant that ends
        under a load has no further runs under it; they count as failed. Raises :class:`UserError`
        where a needed contestant does not start, or, with `leaving`, which compares all with it,
        where it ends."""
        entered = list(contestants)
        racing = {load: [*entered] for group in self.groups for load in group}
        runs = [(each, load, n) for each in entered for load in racing for n in range(self.repeats)]
        kept = sum(self.parts.path(_name(*run)).exists() for run in runs)
        self.observer.stage(stage, len(runs), done=kept)
        turns = [(n, *each) for n in range(self.repeats) for each in enumerate(self.groups)]
        for turn, (repeat, place, group) in enumerate(turns):
            for load in group:
                if self.leaving is not None and repeat and racing[load]:
                    # A contestant that ended under the load is compared with no other.
                    left = self.leaving(load, [c for c in entered if load.key not in c.ended])
                    racing[load] = [each for each in racing[load] if each.name not in left]
            answering = [each for each in entered if any(each in racing[load] for load in group)]
            self._skip(sum(each not in racing[load] for each in entered for load in group))
            for each in interleaved(answering, repeat + place):
                loads = [load for load in group if each in racing[load]]
                first = repeat % len(loads)
                if not self._answer(each, repeat, [*loads[first:], *loads[:first]]):
                    entered.remove(each)
                    self._skip(sum(len(later) for *_, later in turns[turn + 1 :]))
        return entered

    def _answer(self, contestant: LoadContestant, repeat: int, loads: Sequence[Load]) -> bool:
        """Add a run under each load. False where the contestant does not start and has not run
        before."""
        missing = list[Load]()
        for load in loads:
            if (run := self.parts.get(_name(contestant, load, repeat))) is not None:
                contestant.add(load, run)
            elif load.key in contestant.ended:
                self._fail(contestant, load)
            else:
                missing.append(load)
        while missing:
            try:
                for load, run in contestant.answer(tuple(missing)):
                    missing.remove(load)
                    self.parts.keep(_name(contestant, load, repeat), run)
                    contestant.add(load, run)
                    self.observer.step()
            except UserError as error:
                under_load = isinstance(error, EndedUnderLoad)
                if contestant.needed and (self.leaving is not None or not under_load):
                    raise
                self.observer.warned(f"without {contestant.name}: {error}")
                if not (under_load or contestant.runs):
                    self._skip(len(missing))
                    return False
                for load in missing[:1] if under_load else missing[:]:
                    contestant.ended[load.key] = str(error)
                    self._fail(contestant, load)
                    missing.remove(load)
        return True

    def _fail(self, contestant: LoadContestant, load: Load) -> None:
        """A run of failed requests, because the contestant ends under the load."""
        reason, each = contestant.ended[load.key], range(load.requests)
        contestant.add(load, [LoadRecord(index=n, sent=0, error=reason) for n in each])
        self.observer.step()

    def _skip(self, runs: int) -> None:
        for _ in range(runs):
            self.observer.step()


def _name(contestant: LoadContestant, load: Load, repeat: int) -> str:
    """Of a kept run."""
    return f"{plain_name(load.key)}-{repeat}-{contestant.key}"
