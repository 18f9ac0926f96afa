"""How many replicas a load needs, and what load a number of replicas carries, by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import pandas as pd

from specdec_core.cost.steps import StepTimes
from specdec_core.engine.scheduler import Limits
from specdec_core.search.load.answers import Answers
from specdec_core.search.load.measures import LoadMeasures, measure
from specdec_core.search.load.simulator import (
    Router,
    Simulation,
    asks_of,
    asks_of_trace,
    simulate_arrivals,
    simulate_clients,
)
from specdec_core.search.load.step_costs import RequestShape, StepCosts
from specdec_core.search.load.trace import TraceRequest
from specdec_core.search.load.workload import Arrivals, Slo, arrival_times

SHARE = 0.95  # of the requests that have to keep the objective
SECONDS = 20.0  # of arrivals that are simulated, at least
_LEAST = 500  # requests that are simulated, …
_WARM_UP = 0.2  # … of which the first find emptier replicas than later ones, and do not count
# So many times as long as an answer takes are simulated, at least. For the first of them replicas
# fill, and requests of the last one answer beside fewer and fewer others.
_SPAN, _FILLING, _EMPTYING = 6, 2, 1
_FEW = 1000  # times fewer requests than replicas answer one by one are as good as none
_STEPS = 6  # of the search for a rate: to 2 %
_WAVES = 32  # requests for each slot of a full replica: the last ones leave slots empty


@dataclass(frozen=True)
class ServedTraffic:
    """What a replica runs, and the requests that come: at random, or those of a `trace`."""

    answers: Answers
    times: StepTimes
    limits: Limits
    router: Router = field(default_factory=Router)
    arrivals: Arrivals = "poisson"
    seconds: float = SECONDS  # at least, and as long as answers ask for
    trace: tuple[TraceRequest, ...] = ()
    new_tokens: int = 64  # of an answer to a request of the trace that does not say, at most

    @cached_property
    def costs(self) -> StepCosts:
        return StepCosts(self.answers, self.times)

    def simulate(self, rate: float, replicas: int, seconds: float | None = None) -> Simulation:
        """Requests that come at `rate` a second to so many replicas, for `seconds` where these are
        given; or as the trace says."""
        if self.trace:
            asks, coming = self._asks(), [request.arrival for request in self.trace]
        else:
            asks = self._asks(max(round(rate * (seconds or self.seconds)), _LEAST))
            coming = arrival_times(rate, len(asks), self.arrivals).tolist()
        return simulate_arrivals(self.costs, asks, coming, self.limits, replicas, self.router)

    def one_by_one(self) -> Simulation:
        """Requests that each have a replica to themselves, with nothing of another in its cache."""
        limits = replace(self.limits, share_prefixes=False)
        return simulate_clients(self.costs, self._asks(), 1, limits)

    def full_rate(self) -> float:
        """Requests a second that a replica answers whose slots are never empty."""
        asks = asks_of(self.answers, max(_WAVES * self.limits.slots, _LEAST))
        together = [0.0] * len(asks)
        full = simulate_arrivals(self.costs, asks, together, self.limits)
        return len(asks) / full.seconds

    def _asks(self, number: int = _LEAST) -> list[RequestShape]:
        """The trace's requests, or so many."""
        if self.trace:
            return asks_of_trace(self.answers, self.trace, self.new_tokens)
        return asks_of(self.answers, number)


@dataclass(frozen=True)
class Tried:
    """So many replicas under a rate."""

    replicas: int
    rate: float
    measures: LoadMeasures
    busy: float  # the share of the time that a replica steps, on average
    router_busy: float
    messages: float  # a second that this rate makes: additions to answers, for the clients
    waiting: int = 0  # requests without their first token when the last one comes
    simulated: float = 0.0  # seconds of all replicas, …
    took: float = 0.0  # … and of simulating them

    @property
    def row(self) -> dict[str, float]:
        """The numbers, percentiles as `ttft_p95`."""
        measures = self.measures
        percentiles = {
            f"{name}_p{percentile}": value
            for name in ("ttft", "tpot", "latency")
            for percentile, value in getattr(measures, name).items()
        }
        return {
            "replicas": self.replicas,
            "rate": self.rate,
            "good_share": measures.good_share,
            "tokens_per_second": measures.tokens_per_second,
            **percentiles,
            "busy": self.busy,
            "router_busy": self.router_busy,
            "messages": self.messages,
        }


@dataclass
class Capacity:
    """What a search found: `chosen`, if anything keeps the objective; `alone`, what requests
    experience that share a replica with nobody; and everything tried."""

    slo: Slo
    share: float
    chosen: Tried | None
    alone: Tried
    tried: list[Tried] = field(default_factory=list)
    seconds: float = 0.0  # of arrivals that a try simulates; 0: the trace's

    @property
    def pace(self) -> float:
        """Seconds of replicas that are simulated in a second."""
        tried = [self.alone, *self.tried]
        return sum(each.simulated for each in tried) / sum(each.took for each in tried)

    def frame(self) -> pd.DataFrame:
        """One row a try, by replicas and rate."""
        rows = sorted(self.tried, key=lambda each: (each.replicas, each.rate))
        return pd.DataFrame([each.row for each in rows])


def least_replicas(
    service: ServedTraffic,
    rate: float,
    slo: Slo,
    share: float = SHARE,
) -> Capacity:
    """The fewest replicas with which a share of the requests keep `slo`: doubled until they do,
    then bisected."""
    search = _Search(service, slo, share)
    alone = search.alone(rate)
    if alone.measures.good_share < share:
        return search.found(None, alone)
    enough, few = 1, 0
    while not search.good(enough, rate):
        if enough > search.most(rate):  # not more replicas are missing, but faster routers
            return search.found(None, alone)
        enough, few = 2 * enough, enough
    while enough - few > 1:
        middle = (enough + few) // 2
        if search.good(middle, rate):
            enough = middle
        else:
            few = middle
    return search.found(search.find(enough, rate), alone)


def greatest_rate(
    service: ServedTraffic,
    replicas: int,
    slo: Slo,
    share: float = SHARE,
) -> Capacity:
    """The most requests a second that so many replicas answer with a share of them within `slo`, to
    some 2 %."""
    search = _Search(service, slo, share)
    rate = replicas / search.alone_seconds()
    alone = search.alone(rate)
    if alone.measures.good_share < share:
        return search.found(None, alone)
    low = high = rate
    if search.good(replicas, rate):
        while search.good(replicas, high := 2 * low):
            low = high
    else:
        while not search.good(replicas, low := high / 2):
            high = low
            if high < rate / _FEW:  # a router that takes longer than the limits
                return search.found(None, alone)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if search.good(replicas, middle):
            low = middle
        else:
            high = middle
    return search.found(search.find(replicas, low), alone)


class _Search:
    """Simulations, each made once."""

    def __init__(self, service: ServedTraffic, slo: Slo, share: float) -> None:
        self.service, self.slo, self.share = service, slo, share
        self.tried: list[Tried] = []

    def found(self, chosen: Tried | None, alone: Tried) -> Capacity:
        seconds = 0.0 if self.service.trace else self._seconds
        return Capacity(self.slo, self.share, chosen, alone, self.tried, seconds)

    def good(self, replicas: int, rate: float) -> bool:
        """Whether so many replicas keep the objective, and no queue grows behind limits that leave
        waiting out, or that are longer than what is simulated. A trace ends: where waiting has a
        limit, its queue may grow until then."""
        tried = self.find(replicas, rate)
        if tried.measures.good_share < self.share:
            return False
        if not self.service.trace:
            return self._keeps_up(replicas, rate)
        waits = self.slo.ttft is not None or self.slo.latency is not None
        return waits or tried.waiting <= replicas * self.service.limits.slots

    def most(self, rate: float) -> float:
        """More replicas than there are ever requests help no more."""
        if self.service.trace:
            return len(self.service.trace)
        return max(rate * self._seconds, _LEAST)

    def _keeps_up(self, replicas: int, rate: float) -> bool:
        return rate < replicas * self._full_rate and self.service.router.load(rate) < 1

    @cached_property
    def _full_rate(self) -> float:
        return self.service.full_rate()

    @cached_property
    def _longest(self) -> float:
        """Seconds of an answer, on average, where it takes longest: in a full replica, unless who
        drafts for one request alone is slower."""
        return max(self.service.limits.slots / self._full_rate, self.alone_seconds())

    @property
    def _seconds(self) -> float:
        """Seconds of arrivals that are simulated."""
        return max(self.service.seconds, _SPAN * self._longest)

    def find(self, replicas: int, rate: float) -> Tried:
        for each in self.tried:
            if (each.replicas, each.rate) == (replicas, rate):
                return each
        if self.service.trace:
            simulation = self.service.simulate(rate, replicas)
            # A trace is all that comes: what its first and last requests find counts, too.
            steady = simulation.records
        else:
            simulation = self.service.simulate(rate, replicas, self._seconds)
            steady = self._steady(simulation.records)
        tried = self._measure(simulation, steady, replicas, rate)
        self.tried.append(tried)
        return tried

    def _steady(self, records: pd.DataFrame) -> pd.DataFrame:
        """The requests that come when replicas have filled, and are answered before they empty: the
        others have fewer requests beside them than there are in the long run."""
        sent, last = records["sent"], records["sent"].max()
        first = max(_WARM_UP * last, _FILLING * self._longest)
        counts = (sent >= first) & (sent <= last - _EMPTYING * self._longest)
        steady: pd.DataFrame = records[counts]
        return steady

    def alone(self, rate: float) -> Tried:
        """A replica for each request, and no router between."""
        return self._measure(self._one_by_one, self._one_by_one.records, 0, rate)

    def alone_seconds(self) -> float:
        """Seconds of a request that shares its replica with nobody, on average."""
        records = self._one_by_one.records
        return float((records["last"] - records["sent"]).mean())

    @cached_property
    def _one_by_one(self) -> Simulation:
        return self.service.one_by_one()

    def _measure(
        self, simulation: Simulation, counted: pd.DataFrame, replicas: int, rate: float
    ) -> Tried:
        """What `counted`, of the simulation's requests, experience."""
        records = simulation.records
        busy = sum(simulation.busy) / len(simulation.busy)
        return Tried(
            replicas,
            rate,
            measure(counted, self.slo),
            busy,
            min(self.service.router.load(rate), 1.0),
            rate * simulation.rounds / len(records),
            int((records["first"] > records["sent"].max()).sum()),
            simulation.seconds * len(simulation.busy),
            simulation.took,
        )


def mean_rate(trace: Sequence[TraceRequest]) -> float:
    """Requests a second over a trace's length."""
    return len(trace) / max(trace[-1].arrival, 1e-9)
