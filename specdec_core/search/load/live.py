"""A load on the live engine, in this process: clients that wait, or arrivals at given times."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter, sleep
from typing import Any

import pandas as pd

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import StepPlan
from specdec_core.models.pair import Pair
from specdec_core.search.load.measures import COLUMNS
from specdec_core.search.load.traffic import Traffic
from specdec_core.search.load.workload import Load
from specdec_core.tokens.statistics import Generation

_WARM_UP = 2  # untimed requests, at least

# The requests that arrive now, given the seconds since the run began and the number of requests
# that the last step finished (None before the first step).
Arriving = Callable[[float, int | None], Iterable[Request]]


@dataclass
class LiveRun:
    """A run of the live engine: one row a request, and what each step did."""

    rows: list[tuple[Any, ...]] = field(default_factory=list)
    steps: list[StepPlan] = field(default_factory=list)
    decoded: list[list[str]] = field(default_factory=list)  # request ids of each step
    generations: dict[str, Generation] = field(default_factory=dict)  # by request id

    @property
    def records(self) -> pd.DataFrame:
        """As in :mod:`specdec_core.search.load.measures`."""
        return pd.DataFrame(sorted(self.rows), columns=list(COLUMNS))

    @property
    def candidates(self) -> list[list[int]]:
        """The number of candidates of each request in each step."""
        rounds = {name: iter(each.rounds) for name, each in self.generations.items()}
        return [[next(rounds[name]).drafted for name in step] for step in self.decoded]


def run_clients(engine: Engine, requests: Sequence[Request], clients: int) -> LiveRun:
    """A closed loop: each of `clients` clients sends its next request when the last is answered."""
    unsent = iter(requests)
    sent: dict[str, float] = {}

    def arriving(now: float, finished: int | None) -> Iterable[Request]:
        new = list(islice(unsent, clients if finished is None else finished))
        sent.update({request.id: now for request in new})
        return new

    return _run(engine, requests, arriving, sent)


def run_arrivals(engine: Engine, requests: Sequence[Request], arrivals: Sequence[float]) -> LiveRun:
    """An open loop: each request arrives at its second of `arrivals`, however busy the engine is.
    Its times count from then, also where the engine was in a step."""
    pending = list(zip(arrivals, requests, strict=True))
    sent = {request.id: at for at, request in pending}

    def arriving(now: float, finished: int | None) -> Iterable[Request]:
        if engine.idle and pending and pending[0][0] > now:
            sleep(pending[0][0] - now)
            now = pending[0][0]
        while pending and pending[0][0] <= now:
            yield pending.pop(0)[1]

    return _run(engine, requests, arriving, sent)


def _run(
    engine: Engine,
    requests: Sequence[Request],
    arriving: Arriving,
    sent: Mapping[str, float],
) -> LiveRun:
    """Step until every request is answered. `sent` has the time of each request that arrived."""
    run = LiveRun()
    numbered = {request.id: (n, len(request.tokens)) for n, request in enumerate(requests)}
    first: dict[str, float] = {}
    began, finished = perf_counter(), None
    while len(run.rows) < len(requests):
        for request in arriving(perf_counter() - began, finished):
            engine.add(request)
        chunks = engine.step(texts=False)
        end = perf_counter() - began
        run.steps.append(engine.last)
        run.decoded.append([chunk.request_id for chunk in chunks])
        finished = 0
        for chunk in chunks:
            name = chunk.request_id
            first.setdefault(name, end)
            if chunk.finished is not None:
                finished += 1
                run.generations[name] = chunk.finished
                number, prompt = numbered[name]
                times = sent[name], first[name], end
                run.rows.append((number, *times, prompt, len(chunk.finished.tokens), None))
    return run


class EngineTimer:
    """Answers a workload's requests on an engine of this process, under one configuration after
    another."""

    def __init__(self, pair: Pair, traffic: Traffic) -> None:
        self.engine = Engine(pair, limits=traffic.limits)
        self.traffic = traffic
        self._requests: dict[Load, list[Request]] = {}

    def warm_up(self, configuration: Configuration, load: Load) -> None:
        """Answer the first requests, untimed, as many at once as the load may have."""
        self.engine.configure(configuration)
        together = load.clients or self.engine.slots
        run_clients(self.engine, self._of(load)[: max(together, _WARM_UP)], together)
        gc.collect()

    def answer(self, configuration: Configuration, load: Load) -> pd.DataFrame:
        """Records of the load's requests. An open loop's requests arrive on the wall clock."""
        self.engine.configure(configuration)
        requests = self._of(load)
        if load.clients is not None:
            return run_clients(self.engine, requests, load.clients).records
        return run_arrivals(self.engine, requests, self.traffic.arrivals(load)).records

    def _of(self, load: Load) -> list[Request]:
        """Raises :class:`UserError` for a request that the pair cannot take."""
        if load not in self._requests:
            engine, limits = self.engine, self.traffic.limits
            requests = self.traffic.requests(load, engine.pair.tokenizer)
            for number, request in enumerate(requests):
                try:
                    request.check(engine.max_length, engine.vocab_size, limits)
                except UserError as error:
                    raise UserError(f"request {number} of the workload: {error}") from None
            self._requests[load] = requests
        return self._requests[load]
