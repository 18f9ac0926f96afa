"""Simulation of load: any configuration under any workload, without a model.

Requests arrive, engines step. A step takes what the time model says and does what the recorded
rounds say, under the live engine's scheduler. The simulation proceeds from event to event: a
request arrives, a step ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import count
from time import perf_counter

import pandas as pd

from specdec_core.engine.scheduler import Limits
from specdec_core.search.load.answers import Answers
from specdec_core.search.load.measures import COLUMNS
from specdec_core.search.load.replica import Replica, SimulatedRequest
from specdec_core.search.load.step_costs import RequestShape, State, StepCosts
from specdec_core.search.load.trace import TraceRequest

# At the same moment, steps end before requests arrive, and the next steps begin after that.
_END, _ARRIVES, _BEGIN = range(3)


@dataclass
class Simulation:
    """The result of a simulation: `records` as in :mod:`specdec_core.search.load.measures`."""

    records: pd.DataFrame
    steps: int
    seconds: float  # simulated, until the last step's end
    took: float  # seconds of simulating
    busy: list[float]  # the share of the time that each replica steps


def shapes_of(
    answers: Answers, number: int, trace: Sequence[TraceRequest] = (), new_tokens: int = 0
) -> list[RequestShape]:
    """`number` requests: the recorded prompts in their order, repeated. Or the requests of a
    `trace`, each with its prompt's length and the recorded answers in their order. Where the trace
    does not give an answer's length, a recorded answer that ended before the `new_tokens` that were
    recorded at most has the recorded length."""
    places = [n % len(answers) for n in range(len(trace) or number)]
    recorded = [RequestShape(n, answers.prompts[n], answers.lengths[n]) for n in places]
    if not trace:
        return recorded
    shapes = []
    for shape, request in zip(recorded, trace, strict=True):
        most = request.most_tokens(new_tokens)
        if request.output_tokens is None and shape.most < new_tokens:
            most = min(most, shape.most)
        assert request.prompt_tokens is not None
        shapes.append(RequestShape(shape.answer, request.prompt_tokens, most))
    return shapes


def simulate_clients(
    costs: StepCosts, shapes: Sequence[RequestShape], clients: int, limits: Limits
) -> Simulation:
    """A closed loop: each of `clients` clients sends the next of `shapes` to one replica when its
    last request is answered."""
    arrivals = [0.0] * min(clients, len(shapes))
    return _EventLoop(costs, limits, replicas=1).run(shapes, arrivals, closed=True)


def simulate_arrivals(
    costs: StepCosts,
    shapes: Sequence[RequestShape],
    arrivals: Sequence[float],
    limits: Limits,
    replicas: int = 1,
) -> Simulation:
    """An open loop: each of `shapes` arrives at its second of `arrivals`, in increasing order. It
    goes to the least busy replica, as in a server."""
    return _EventLoop(costs, limits, replicas).run(shapes, arrivals, closed=False)


class _EventLoop:
    """The replicas, and the events to come."""

    def __init__(self, costs: StepCosts, limits: Limits, replicas: int) -> None:
        self.costs = costs
        self.replicas = [Replica(costs, limits) for _ in range(replicas)]
        self.running = [False] * replicas  # whether a step is under way or about to begin
        # Numbers of unfinished requests, with the replica. An old number is found by not being so.
        self.loads = [(0, number) for number in range(replicas)]
        # Time, kind, order, and the number of the request or replica.
        self.events: list[tuple[float, int, int, int]] = []
        self.order = count()

    def run(
        self, shapes: Sequence[RequestShape], arrivals: Sequence[float], closed: bool
    ) -> Simulation:
        """Simulate until every request is answered. In a closed loop the requests after the first
        `arrivals` arrive as earlier ones finish."""
        began, now = perf_counter(), 0.0
        unsent, rows = enumerate(shapes), list[tuple[object, ...]]()
        for at in arrivals:
            self._push(at, _ARRIVES)
        while self.events:
            now, what, _, number = heappop(self.events)
            if what == _END:
                for request in self.replicas[number].end(now):
                    times = request.sent, request.first, now
                    tokens = request.shape.prompt_tokens, request.state.generated
                    rows.append((request.index, *times, *tokens, None))
                    if closed:
                        self._push(now, _ARRIVES)
                heappush(self.loads, (self.replicas[number].requests, number))
                self._push(now, _BEGIN, number)
            elif what == _BEGIN:
                replica = self.replicas[number]
                self.running[number] = not replica.idle
                if self.running[number]:
                    self._push(replica.begin(now), _END, number)
            elif (sent := next(unsent, None)) is not None:
                index, shape = sent
                state = State(generated=0, rounds=0, held=0, read=self.costs.unread)
                self._route(SimulatedRequest(index, str(index), shape, now, state), now)
        took, total = perf_counter() - began, now or 1.0
        return Simulation(
            records=pd.DataFrame(sorted(rows), columns=list(COLUMNS)),
            steps=sum(replica.steps for replica in self.replicas),
            seconds=now,
            took=took,
            busy=[replica.busy_seconds / total for replica in self.replicas],
        )

    def _push(self, at: float, what: int, number: int = -1) -> None:
        heappush(self.events, (at, what, next(self.order), number))

    def _route(self, request: SimulatedRequest, now: float) -> None:
        """Send a request to the least busy replica."""
        while self.loads[0][0] != self.replicas[self.loads[0][1]].requests:
            heappop(self.loads)
        number = self.loads[0][1]
        self.replicas[number].add(request)
        heapreplace(self.loads, (self.replicas[number].requests, number))
        if not self.running[number]:
            self.running[number] = True
            self._push(now, _BEGIN, number)
