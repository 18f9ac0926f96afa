"""A load on the live engine, in this process: clients that wait, or arrivals at given times."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from time import perf_counter, sleep
from typing import Any

import pandas as pd

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.search.load.measures import COLUMNS
from specdec_core.search.load.traffic import Traffic
from specdec_core.search.load.workload import Load

_WARM_UP = 2  # untimed requests, at least

# The requests that arrive now, given the seconds since the run began and the number of requests
# that the last step finished (None before the first step).
Arriving = Callable[[float, int | None], Iterable[Request]]


def run_clients(engine: Engine, requests: Sequence[Request], clients: int) -> pd.DataFrame:
    """A closed loop: each of `clients` clients sends its next request when the last is answered.
    Returns records as in :mod:`specdec_core.search.load.measures`."""
    unsent = iter(requests)
    sent: dict[str, float] = {}

    def arriving(now: float, finished: int | None) -> Iterable[Request]:
        new = list(islice(unsent, clients if finished is None else finished))
        sent.update({request.id: now for request in new})
        return new

    return _run(engine, requests, arriving, sent)


def run_arrivals(
    engine: Engine, requests: Sequence[Request], arrivals: Sequence[float]
) -> pd.DataFrame:
    """An open loop: each request arrives at its second of `arrivals`, however busy the engine is.
    Its times count from then, also where the engine was in a step. Returns records."""
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
) -> pd.DataFrame:
    """Step until every request is answered. `sent` has the time of each request that arrived."""
    numbered = {request.id: (n, len(request.tokens)) for n, request in enumerate(requests)}
    rows: list[tuple[Any, ...]] = []
    first: dict[str, float] = {}
    began, finished = perf_counter(), None
    while len(rows) < len(requests):
        for request in arriving(perf_counter() - began, finished):
            engine.add(request)
        chunks = engine.step(texts=False)
        end, finished = perf_counter() - began, 0
        for chunk in chunks:
            name = chunk.request_id
            first.setdefault(name, end)
            if chunk.finished is not None:
                finished += 1
                number, prompt = numbered[name]
                times = sent[name], first[name], end
                rows.append((number, *times, prompt, len(chunk.finished.tokens), None))
    return pd.DataFrame(sorted(rows), columns=list(COLUMNS))


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
            return run_clients(self.engine, requests, load.clients)
        return run_arrivals(self.engine, requests, self.traffic.arrivals(load))

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
