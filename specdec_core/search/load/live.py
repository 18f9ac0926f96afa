"""A load on the live engine, in this process: clients that wait, or arrivals at given times."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from time import perf_counter, sleep

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.search.load.records import LoadRecord, LoadRun
from specdec_core.search.load.traffic import Traffic
from specdec_core.search.load.workload import Load

_WARM_UP = 2  # untimed requests, at least

# The requests that arrive now, given the seconds since the run began and the number of requests
# that the last step finished (None before the first step).
Arriving = Callable[[float, int | None], Iterable[Request]]


def run_clients(engine: Engine, requests: Sequence[Request], clients: int) -> LoadRun:
    """A closed loop: each of `clients` clients sends its next request when the last is answered."""
    unsent = iter(requests)
    sent: dict[str, float] = {}

    def arriving(now: float, finished: int | None) -> Iterable[Request]:
        new = list(islice(unsent, clients if finished is None else finished))
        sent.update({request.id: now for request in new})
        return new

    return _run(engine, requests, arriving, sent)


def run_arrivals(engine: Engine, requests: Sequence[Request], arrivals: Sequence[float]) -> LoadRun:
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
) -> LoadRun:
    """Step until every request is answered. `sent` has the time of each request that arrived."""
    first: dict[str, float] = {}
    answered: dict[str, tuple[float, int]] = {}  # the end, and the number of tokens
    began, finished = perf_counter(), None
    while len(answered) < len(requests):
        for request in arriving(perf_counter() - began, finished):
            engine.add(request)
        chunks = engine.step(texts=False)
        end, finished = perf_counter() - began, 0
        for chunk in chunks:
            first.setdefault(chunk.request_id, end)
            if chunk.finished is not None:
                engine.check(chunk.finished)
                finished += 1
                answered[chunk.request_id] = end, len(chunk.finished.tokens)
    return [
        LoadRecord(
            index=number,
            sent=sent[request.id],
            first=first[request.id],
            last=answered[request.id][0],
            prompt_tokens=len(request.tokens),
            tokens=answered[request.id][1],
        )
        for number, request in enumerate(requests)
    ]


class EngineTimer:
    """Answers a workload's requests on an engine of this process, under one configuration after
    another."""

    def __init__(self, pair: Pair, traffic: Traffic) -> None:
        self.engine = Engine(pair, limits=traffic.limits)
        self.traffic = traffic
        self._requests: dict[Load, list[Request]] = {}
        self._warm: set[tuple[Load, str]] = set()

    def answer(self, configuration: Configuration, load: Load) -> LoadRun:
        """Answer the load's requests. An open loop's requests arrive on the wall clock. Some are
        answered untimed before the first run: steps of a new shape compile their kernels."""
        requests = self._of(load)
        if (load, configuration.id) not in self._warm:
            self._warm.add((load, configuration.id))
            together = load.clients or self.engine.slots
            self.engine.configure(configuration)
            run_clients(self.engine, requests[: max(together, _WARM_UP)], together)
            gc.collect()
        self.engine.configure(configuration)  # drafters begin with nothing learned
        if load.clients is not None:
            return run_clients(self.engine, requests, load.clients)
        return run_arrivals(self.engine, requests, self.traffic.arrivals(load))

    def _of(self, load: Load) -> list[Request]:
        """Raises :class:`UserError` for a request that the pair cannot take."""
        if load not in self._requests:
            engine = self.engine
            requests = self.traffic.requests(load, engine.pair.tokenizer)
            for number, request in enumerate(requests):
                try:
                    request.check(engine.max_length, engine.vocab_size)
                except UserError as error:
                    raise UserError(f"request {number} of the workload: {error}") from None
            self._requests[load] = requests
        return self._requests[load]
