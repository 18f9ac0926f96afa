"""How many replicas a load needs, and what load a number of replicas carries, by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pandas as pd

from specdec_core.base.errors import UserError
from specdec_core.cost.steps import StepTimes
from specdec_core.engine.scheduler import Limits
from specdec_core.search.load.answers import Answers
from specdec_core.search.load.measures import LoadMeasures, measure
from specdec_core.search.load.simulator import (
    Simulation,
    shapes_of,
    simulate_arrivals,
    simulate_clients,
)
from specdec_core.search.load.step_costs import RequestShape, StepCosts
from specdec_core.search.load.trace import TraceRequest
from specdec_core.search.load.workload import Arrivals, Slo, arrival_times

SHARE = 0.95  # of the requests that have to keep the objective
SECONDS = 20.0  # of arrivals that are simulated, at least
_LEAST = 500  # requests that are simulated
_WARM_UP = 0.2  # the share of them that does not count: the first find emptier replicas
# Arrivals are simulated for at least _SPAN times the seconds of an answer. In the first _FILLING of
# these, replicas fill; requests of the last one are answered while replicas empty.
_SPAN, _FILLING, _EMPTYING = 6, 2, 1
_STEPS = 6  # of the search for a rate: to 2 %
_LEAST_BUSY = 1e-3  # requests at a time: at still lower rates each is alone all the same
_WAVES = 32  # requests for each slot of a full replica: the last ones leave slots empty


@dataclass(frozen=True)
class ServedTraffic:
    """What a replica runs, and its requests: at random, or a `trace`."""

    answers: Answers
    times: StepTimes
    limits: Limits
    arrivals: Arrivals = "poisson"
    seconds: float = SECONDS  # of arrivals, at least
    trace: tuple[TraceRequest, ...] = ()
    new_tokens: int = 64  # the most of an answer to a request of the trace that gives no limit

    @cached_property
    def costs(self) -> StepCosts:
        return StepCosts(self.answers, self.times)

    def simulate(self, rate: float, replicas: int, seconds: float | None = None) -> Simulation:
        """Requests that arrive at `rate` a second, for `seconds` where these are given; or as the
        trace says."""
        shapes = self._shapes(max(round(rate * (seconds or self.seconds)), _LEAST))
        arrivals = [request.arrival for request in self.trace]
        arrivals = arrivals or arrival_times(rate, len(shapes), self.arrivals).tolist()
        return simulate_arrivals(self.costs, shapes, arrivals, self.limits, replicas)

    @cached_property
    def alone(self) -> Simulation:
        """Each request has a replica to itself."""
        return simulate_clients(self.costs, self._shapes(), 1, self.limits)

    @cached_property
    def alone_seconds(self) -> float:
        """Mean seconds of a request alone."""
        return float((self.alone.records["last"] - self.alone.records["sent"]).mean())

    @cached_property
    def full_rate(self) -> float:
        """Requests a second that a replica answers while its slots are never empty."""
        shapes = shapes_of(self.answers, max(_WAVES * self.limits.slots, _LEAST))
        full = simulate_arrivals(self.costs, shapes, [0.0] * len(shapes), self.limits)
        return len(shapes) / full.seconds

    @cached_property
    def longest(self) -> float:
        """Mean seconds of an answer where it takes longest: in a full replica, unless drafting for
        one request alone is slower."""
        return max(self.limits.slots / self.full_rate, self.alone_seconds)

    @property
    def span(self) -> float:
        """Seconds of arrivals that a search simulates."""
        return max(self.seconds, _SPAN * self.longest)

    def most(self, rate: float) -> float:
        """The number of requests in a search: more replicas do not help."""
        return len(self.trace) or max(rate * self.span, _LEAST)

    def steady(self, records: pd.DataFrame) -> pd.DataFrame:
        """The requests that arrive when replicas have filled, and are answered before they empty:
        further requests have fewer beside them than in the long run. Of a trace, all requests
        count."""
        if self.trace:
            return records
        sent, last = records["sent"], records["sent"].max()
        first = max(_WARM_UP * last, _FILLING * self.longest)
        counts = (sent >= first) & (sent <= last - _EMPTYING * self.longest)
        steady: pd.DataFrame = records[counts]
        return steady

    def _shapes(self, number: int = _LEAST) -> list[RequestShape]:
        """The trace's requests, or `number` requests."""
        return shapes_of(self.answers, number, self.trace, self.new_tokens)


@dataclass(frozen=True)
class Tried:
    """A number of replicas at a rate."""

    replicas: int
    rate: float
    measures: LoadMeasures
    busy: float  # the share of the time that a replica steps, on average
    waiting: int  # requests without their first token when the last one arrives
    simulated: float  # seconds of all replicas, …
    took: float  # … and of simulating them

    @property
    def row(self) -> dict[str, float]:
        """The numbers, percentiles as `ttft_p95`."""
        percentiles = {
            f"{name}_p{percentile}": value
            for name in ("ttft", "tpot", "latency")
            for percentile, value in getattr(self.measures, name).items()
        }
        return {
            "replicas": self.replicas,
            "rate": self.rate,
            "good_share": self.measures.good_share,
            "tokens_per_second": self.measures.tokens_per_second,
            **percentiles,
            "busy": self.busy,
        }


@dataclass
class Capacity:
    """A search, and its result: `chosen`, if anything keeps the objective; `alone`, for requests
    that each have a replica to themselves; and everything tried."""

    service: ServedTraffic
    slo: Slo
    share: float
    chosen: Tried | None = None
    tried: list[Tried] = field(default_factory=list)

    @cached_property
    def alone(self) -> Tried:
        simulation = self.service.alone
        return self._judged(simulation, simulation.records, replicas=0, rate=0.0)

    @property
    def possible(self) -> bool:
        """Whether requests that are alone on a replica keep the objective."""
        return self.alone.measures.good_share >= self.share

    @property
    def seconds(self) -> float:
        """Of arrivals that a try simulates; 0: the trace's."""
        return 0.0 if self.service.trace else self.service.span

    @property
    def pace(self) -> float:
        """Seconds of replicas that are simulated in a second."""
        tried = [self.alone, *self.tried]
        return sum(each.simulated for each in tried) / sum(each.took for each in tried)

    def frame(self) -> pd.DataFrame:
        """One row a try, by replicas and rate."""
        rows = sorted(self.tried, key=lambda each: (each.replicas, each.rate))
        return pd.DataFrame([each.row for each in rows])

    def good(self, replicas: int, rate: float) -> bool:
        """Whether the replicas keep the objective, and keep up: limits may exclude waiting, or be
        longer than the simulation, while a queue grows. A trace ends: where waiting has a limit,
        its queue may grow until then."""
        service, tried = self.service, self.at(replicas, rate)
        if tried.measures.good_share < self.share:
            return False
        if not service.trace:
            return rate < replicas * service.full_rate
        waits = self.slo.ttft is not None or self.slo.latency is not None
        return waits or tried.waiting <= replicas * service.limits.slots

    def at(self, replicas: int, rate: float) -> Tried:
        """A number of replicas at a rate, simulated once."""
        for each in self.tried:
            if (each.replicas, each.rate) == (replicas, rate):
                return each
        simulation = self.service.simulate(rate, replicas, self.service.span)
        counted = self.service.steady(simulation.records)
        self.tried.append(self._judged(simulation, counted, replicas, rate))
        return self.tried[-1]

    def _judged(
        self, simulation: Simulation, counted: pd.DataFrame, replicas: int, rate: float
    ) -> Tried:
        """By the `counted` requests of a simulation."""
        records = simulation.records
        return Tried(
            replicas=replicas,
            rate=rate,
            measures=measure(counted, self.slo),
            busy=sum(simulation.busy) / len(simulation.busy),
            waiting=int((records["first"] > records["sent"].max()).sum()),
            simulated=simulation.seconds * len(simulation.busy),
            took=simulation.took,
        )


def least_replicas(service: ServedTraffic, rate: float, slo: Slo, share: float = SHARE) -> Capacity:
    """The fewest replicas with which a share of the requests keep `slo`: doubled until they do,
    then bisected."""
    search = Capacity(service, slo, share)
    if not search.possible:
        return search
    enough, few = 1, 0
    while not search.good(enough, rate):
        if enough > service.most(rate):
            return search
        enough, few = 2 * enough, enough
    while enough - few > 1:
        middle = (enough + few) // 2
        enough, few = (middle, few) if search.good(middle, rate) else (enough, middle)
    search.chosen = search.at(enough, rate)
    return search


def greatest_rate(
    service: ServedTraffic, replicas: int, slo: Slo, share: float = SHARE
) -> Capacity:
    """The highest rate at which `replicas` replicas answer a share of requests within `slo`, to
    some 2 %. Without a choice where they do at no rate."""
    search = Capacity(service, slo, share)
    if not search.possible:
        return search
    low = high = replicas / service.alone_seconds
    if search.good(replicas, low):
        while search.good(replicas, high := 2 * low):
            low = high
    else:
        while not search.good(replicas, low := high / 2):
            if low * service.alone_seconds < _LEAST_BUSY:
                return search  # alone, enough requests keep it; of the steady ones, too few
            high = low
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if search.good(replicas, middle) else (low, middle)
    search.chosen = search.at(replicas, low)
    return search


def mean_rate(trace: Sequence[TraceRequest], where: str) -> float:
    """Requests a second from a trace's first arrival to its last. Raises :class:`UserError`, which
    names the trace as `where`, if all arrive at the same time."""
    first, last = trace[0].arrival, trace[-1].arrival
    if first == last:
        raise UserError(
            f"{where}: no rate: every request arrives at {first:g} s; expected arrivals that are"
            " spread over some seconds"
        )
    return len(trace) / (last - first)
