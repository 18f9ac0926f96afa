"""Simulation of load: any configuration under any workload, without a model.

Requests come, engines step. A step takes what the time model says and does what the recorded rounds
say, under the live engine's scheduler. The simulation goes from event to event: a request comes, a
step ends.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from time import perf_counter
from typing import Literal

import pandas as pd

from specdec_core.engine.scheduler import Limits
from specdec_core.search.load.answers import Answers
from specdec_core.search.load.measures import COLUMNS, LoadMeasures, measure
from specdec_core.search.load.replica import Replica, SimulatedRequest, SimulatedStep
from specdec_core.search.load.step_costs import RequestRounds, RequestShape, State, StepCosts
from specdec_core.search.load.trace import TraceRequest
from specdec_core.search.load.workload import Slo

Routing = Literal["round_robin", "least_loaded", "two_choices"]

# At the same moment, steps end before requests come, and the next steps begin after that.
_END, _COMES, _ROUTED, _BEGIN = range(4)


@dataclass(frozen=True)
class Router:
    """Sends each request to a replica: to all in turn, to the one with the fewest unfinished
    requests, or to the better of two random ones (as Ray Serve does). Passing a request on takes it
    `seconds`, one request after the other. The replicas' loads are known at once."""

    routing: Routing = "round_robin"
    seconds: float = 0.0
    number: int = 1  # of such routers, which requests reach in turn

    def load(self, rate: float) -> float:
        """The share of their time that so many requests a second take; above 1 they queue up."""
        return rate * self.seconds / self.number


@dataclass
class Simulation:
    """What a simulation found out: `records` as in :mod:`specdec_core.search.load.measures`."""

    records: pd.DataFrame
    steps: int
    rounds: int  # of all requests
    seconds: float  # simulated, until the last step's end
    took: float  # seconds of simulating
    busy: list[float]  # the share of the time that each replica steps
    router_busy: float
    preemptions: int
    log: list[SimulatedStep] = field(default_factory=list)  # of a single replica, where wanted

    def measure(self, slo: Slo | None = None) -> LoadMeasures:
        return measure(self.records, slo)


def asks_of(answers: Answers, number: int) -> list[RequestShape]:
    """So many requests: the recorded prompts in their order, again and again."""
    places = [n % len(answers) for n in range(number)]
    return [RequestShape(n, answers.prompts[n], answers.lengths[n]) for n in places]


def asks_of_trace(
    answers: Answers, trace: Sequence[TraceRequest], new_tokens: int
) -> list[RequestShape]:
    """The requests of a trace, each with its prompt's length, which are given the recorded answers
    in their order. Where the trace does not tell an answer's length, the recorded one ends where it
    ended by itself, before the `new_tokens` that were recorded at most."""
    asks = []
    for ask, request in zip(asks_of(answers, len(trace)), trace, strict=True):
        most = request.most_tokens(new_tokens)
        if request.output_tokens is None and ask.most < new_tokens:
            most = min(most, ask.most)
        assert request.prompt_tokens is not None
        asks.append(RequestShape(ask.answer, request.prompt_tokens, most))
    return asks


def simulate_clients(
    costs: StepCosts,
    asks: Sequence[RequestShape],
    clients: int,
    limits: Limits,
    replicas: int = 1,
    router: Router | None = None,
    log: bool = False,
) -> Simulation:
    """A closed loop: each of so many clients sends the next of `asks` when its answer is whole."""
    loop = _EventLoop(costs, limits, replicas, router or Router(), log)
    return loop.run(asks, [0.0] * min(clients, len(asks)), closed=True)


def simulate_arrivals(
    costs: StepCosts,
    asks: Sequence[RequestShape],
    arrivals: Sequence[float],
    limits: Limits,
    replicas: int = 1,
    router: Router | None = None,
    log: bool = False,
) -> Simulation:
    """An open loop: each of `asks` comes at its second of `arrivals`, in increasing order."""
    loop = _EventLoop(costs, limits, replicas, router or Router(), log)
    return loop.run(asks, arrivals, closed=False)


class _EventLoop:
    """The replicas, their router, and what happens when."""

    def __init__(
        self,
        costs: StepCosts,
        limits: Limits,
        replicas: int,
        router: Router,
        log: bool,
    ) -> None:
        self.costs = costs
        self.log: list[SimulatedStep] = []
        steps = self.log if log else None
        self.replicas = [Replica(costs, limits, steps) for _ in range(replicas)]
        self.running = [False] * replicas  # whether steps are under way or about to begin
        self.ending = [-1] * replicas  # the place in the order of events at which they end
        self.router, self.router_seconds = router, 0.0
        self.routers = deque([0.0] * router.number)  # when each is free
        self.turn, self.random = count(), random.Random(0)
        self.events: list[tuple[float, int, int, int]] = []  # when, what, in which order, of whom
        self.order = count()
        self.rows: list[tuple[object, ...]] = []
        self.rounds = 0

    def run(
        self, asks: Sequence[RequestShape], arrivals: Sequence[float], closed: bool
    ) -> Simulation:
        began, now = perf_counter(), 0.0
        requests: dict[int, SimulatedRequest] = {}
        index = 0
        coming, courses = iter(arrivals), self.costs.courses(asks)
        for at in coming:
            self._push(at, _COMES, -1)
            if not closed:
                break  # each brings the one after it
        events = self.events
        while events:
            now, what, number, whom = heappop(events)
            if what == _END:
                if number != self.ending[whom]:
                    continue  # a request came before
                replica = self.replicas[whom]
                for request in replica.end(now):
                    self._record(request, now)
                    if closed:
                        self._push(now, _COMES, -1)
                if events and events[0][0] <= now:
                    self._push(now, _BEGIN, whom)
                else:
                    self._begin(whom, now)
            elif what == _BEGIN:
                self._begin(whom, now)
            elif what == _COMES:
                course = next(courses, None)
                if course is None:
                    continue
                if not closed and (later := next(coming, None)) is not None:
                    self._push(later, _COMES, -1)
                requests[index] = self._request(index, course, now)
                if self.router.seconds:
                    self._push(self._pass_on(now), _ROUTED, index)
                else:
                    self._route(requests.pop(index), now)
                index += 1
            else:
                self._route(requests.pop(whom), now)
        return self._result(now, perf_counter() - began)

    def _push(self, at: float, what: int, whom: int) -> int:
        number = next(self.order)
        heappush(self.events, (at, what, number, whom))
        return number

    def _request(self, index: int, course: RequestRounds, now: float) -> SimulatedRequest:
        state = State(generated=0, rounds=0, held=0, read=self.costs.unread)
        return SimulatedRequest(index, str(index), course, now, state)

    def _begin(self, whom: int, now: float) -> None:
        """The next steps of a replica, if it has anything to do."""
        replica = self.replicas[whom]
        self.running[whom] = not replica.idle
        if self.running[whom]:
            self.ending[whom] = self._push(replica.begin(now), _END, whom)

    def _route(self, request: SimulatedRequest, now: float) -> None:
        whom = self._choose()
        replica = self.replicas[whom]
        replica.add(request)
        if not self.running[whom]:
            self.running[whom] = True
            self._push(now, _BEGIN, whom)
        elif (end := replica.interrupt(now)) is not None:
            self.ending[whom] = self._push(end, _END, whom)

    def _pass_on(self, now: float) -> float:
        """When the next router in turn has passed on a request that comes now."""
        at = max(self.routers[0], now) + self.router.seconds
        self.routers.popleft()
        self.routers.append(at)
        self.router_seconds += self.router.seconds
        return at

    def _choose(self) -> int:
        """The number of the replica that the next request goes to."""
        number = len(self.replicas)
        if number == 1:
            return 0
        if self.router.routing == "round_robin":
            return next(self.turn) % number
        if self.router.routing == "least_loaded":
            loads = [replica.requests for replica in self.replicas]
            return loads.index(min(loads))
        first, second = self.random.sample(range(number), 2)
        return min(first, second, key=lambda whom: self.replicas[whom].requests)

    def _record(self, request: SimulatedRequest, now: float) -> None:
        ask, state = request.course.ask, request.state
        times = request.sent, request.first, now
        self.rounds += state.rounds
        self.rows.append((request.index, *times, ask.prompt_tokens, state.generated, None))

    def _result(self, seconds: float, took: float) -> Simulation:
        records = pd.DataFrame(sorted(self.rows), columns=list(COLUMNS))
        total = seconds or 1.0
        return Simulation(
            records=records,
            steps=sum(replica.steps for replica in self.replicas),
            rounds=self.rounds,
            seconds=seconds,
            took=took,
            busy=[replica.busy_seconds / total for replica in self.replicas],
            router_busy=self.router_seconds / total / self.router.number,
            preemptions=sum(replica.scheduler.preemptions for replica in self.replicas),
            log=self.log,
        )
