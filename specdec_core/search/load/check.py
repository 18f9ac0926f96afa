"""The simulation of load held against the live engine: the same requests, clients and limits.

A machine is faster in one minute than in another, by more than a simulation may be off. Step times
are therefore measured in turns with the live runs that they are to foretell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, sleep
from typing import Any

import pandas as pd

from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration, distinct_labels
from specdec_core.cost.steps import StepTimes
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits, StepPlan
from specdec_core.measure.step_times import StepMeasurer, engine_runs
from specdec_core.models.pair import Pair
from specdec_core.recordings.replay import Replay
from specdec_core.search.load.answers import replayed_answers
from specdec_core.search.load.measures import COLUMNS, LoadMeasures, measure
from specdec_core.search.load.simulator import asks_of, simulate_arrivals, simulate_clients
from specdec_core.search.load.step_costs import StepCosts
from specdec_core.search.load.workload import arrival_times
from specdec_core.tokens.statistics import Generation

CLIENTS = (1, 4, 8, 16)
SHARES = (0.5, 0.8)  # of the requests a second that all slots together answer
REQUESTS = 200  # at each of these rates
_EACH = 4  # requests for each client, …
_LEAST = 16  # … and at least


@dataclass
class LiveRun:
    """A run of the live engine: records of its requests, and what each step did in how long."""

    rows: list[tuple[Any, ...]] = field(default_factory=list)
    steps: list[StepPlan] = field(default_factory=list)
    decoded: list[list[str]] = field(default_factory=list)  # requests of each step, by id
    seconds: list[float] = field(default_factory=list)
    generations: dict[str, Generation] = field(default_factory=dict)

    @property
    def records(self) -> pd.DataFrame:
        """As in :mod:`specdec_core.search.load.measures`."""
        return pd.DataFrame(sorted(self.rows), columns=list(COLUMNS))

    @property
    def candidates(self) -> list[list[int]]:
        """How many candidates each request of each step had."""
        rounds = {name: iter(each.rounds) for name, each in self.generations.items()}
        return [[next(rounds[name]).drafted for name in step] for step in self.decoded]


def run_clients(
    engine: Engine,
    requests: Sequence[Request],
    clients: int,
    texts: bool = False,
    apart: bool = False,
) -> LiveRun:
    """A closed loop: each of `clients` clients sends the next request when its answer is whole.
    With `texts` each step makes its tokens' text, too, as for clients that read along. Clients that
    are `apart` send while the engine is in its next step, as those of other processes do."""
    waiting = iter(requests)
    under_way: list[Request] = []
    sent: dict[str, float] = {}

    def more(now: float, finished: int, started: bool) -> Iterable[Request]:
        wanted = finished if started else clients
        new = [r for _, r in zip(range(wanted), waiting, strict=False)]
        sent.update({request.id: now for request in new})
        if not apart or not started or engine.idle:
            new, under_way[:] = [*under_way, *new], []
            return new
        arrived, under_way[:] = list(under_way), new
        return arrived

    return _sent(_run(engine, requests, more, texts), requests, sent)


def run_arrivals(
    engine: Engine, requests: Sequence[Request], arrivals: Sequence[float], texts: bool = False
) -> LiveRun:
    """An open loop: each request comes at its second of `arrivals`, however busy the engine is."""
    coming = list(zip(arrivals, requests, strict=True))

    def more(now: float, finished: int, started: bool) -> Iterable[Request]:
        if engine.idle and coming and coming[0][0] > now:
            sleep(coming[0][0] - now)
            now = coming[0][0]
        arrived = 0
        while arrived < len(coming) and coming[arrived][0] <= now:
            arrived += 1
        ready, coming[:arrived] = [request for _, request in coming[:arrived]], []
        return ready

    run = _run(engine, requests, more, texts)
    # A request has come when it should have, though the engine was in a step just then.
    due = {request.id: at for at, request in zip(arrivals, requests, strict=True)}
    return _sent(run, requests, due)


def _sent(run: LiveRun, requests: Sequence[Request], sent: Mapping[str, float]) -> LiveRun:
    """The run with the times at which the requests were sent, by id."""
    ids = [request.id for request in requests]
    run.rows = [(index, sent[ids[index]], *rest) for index, _, *rest in run.rows]
    return run


def _run(
    engine: Engine,
    requests: Sequence[Request],
    more: Callable[[float, int, bool], Iterable[Request]],
    texts: bool,
) -> LiveRun:
    """Step until every request is answered; `more` returns the requests that come now, after so
    many have finished."""
    run = LiveRun()
    numbers = {request.id: number for number, request in enumerate(requests)}
    lengths = {request.id: len(request.tokens) for request in requests}
    sent: dict[str, float] = {}
    first: dict[str, float] = {}
    began, finished = perf_counter(), 0
    while len(run.rows) < len(requests):
        now = perf_counter() - began
        for request in more(now, finished, bool(run.steps)):
            engine.add(request)
            sent[request.id] = now
        start = perf_counter()
        chunks = engine.step(texts)
        end = perf_counter()
        run.steps.append(engine.last)
        run.seconds.append(end - start)
        finished = 0
        for chunk in chunks:
            first.setdefault(chunk.request_id, end - began)
            if chunk.finished is not None:
                finished += 1
                run.generations[chunk.request_id] = chunk.finished
                name, tokens = chunk.request_id, len(chunk.finished.tokens)
                times = sent[name], first[name], end - began
                run.rows.append((numbers[name], *times, lengths[name], tokens, None))
        run.decoded.append([chunk.request_id for chunk in chunks])
    return run


# What is compared, by column.
Compared = Mapping[str, Callable[[LoadMeasures], float]]
_BOTH: Compared = {
    "tokens_per_second": lambda measures: measures.tokens_per_second,
    "tpot": lambda measures: measures.value("tpot", 50),
}
OF_CLIENTS: Compared = {**_BOTH, "ttft": lambda measures: measures.value("ttft", 50)}
OF_RATES: Compared = {**_BOTH, "ttft_p95": lambda measures: measures.value("ttft", 95)}


@dataclass
class LoadCheck:
    """Measures by number of clients and configuration: of each live run, and simulated."""

    configurations: list[Configuration]
    live: dict[tuple[int, str], list[LoadMeasures]] = field(default_factory=dict)
    simulated: dict[tuple[int, str], LoadMeasures] = field(default_factory=dict)

    def table(self) -> pd.DataFrame:
        """One row a number of clients and configuration: tokens a second, median TPOT and median
        TTFT, live (medians of the runs) and simulated, and the simulation's relative errors."""
        labels = distinct_labels(self.configurations)
        rows = []
        for (clients, config_id), live in self.live.items():
            simulated = self.simulated[clients, config_id]
            about = {"clients": clients, "configuration": labels[config_id]}
            rows.append(about | _held_against(simulated, live, OF_CLIENTS))
        return pd.DataFrame(rows)


@dataclass
class ArrivalCheck:
    """Measures by share of the capacity and configuration: of each live run, and simulated;
    `capacity` is how many requests a second each configuration answered live with all slots
    busy."""

    configurations: list[Configuration]
    capacity: dict[str, float] = field(default_factory=dict)
    live: dict[tuple[float, str], list[LoadMeasures]] = field(default_factory=dict)
    simulated: dict[tuple[float, str], LoadMeasures] = field(default_factory=dict)

    def table(self) -> pd.DataFrame:
        """One row a share and configuration: the rate, tokens a second, median TPOT and the 95th
        percentile of TTFT, live (medians of the runs) and simulated, and the simulation's relative
        errors."""
        labels = distinct_labels(self.configurations)
        rows = []
        for (share, config_id), live in self.live.items():
            about = {
                "share": share,
                "rate": share * self.capacity[config_id],
                "configuration": labels[config_id],
                "requests": live[0].requests,
            }
            rows.append(about | _held_against(self.simulated[share, config_id], live, OF_RATES))
        return pd.DataFrame(rows)


def _held_against(
    simulated: LoadMeasures, live: Sequence[LoadMeasures], compared: Compared
) -> dict[str, float]:
    """Columns of what is compared, by its name: live, simulated, and the relative error."""
    columns: dict[str, float] = {}
    for name, of in compared.items():
        ours, theirs = of(simulated), median(map(of, live))
        columns |= {name: theirs, f"{name}_simulated": ours, f"{name}_error": ours / theirs - 1}
    return columns


class LoadChecker:
    """Answers recorded prompts live, autoregressively and under each of `configurations`, and
    simulates the same with step times of the same minutes."""

    def __init__(
        self,
        pair: Pair,
        replay: Replay,
        configurations: Sequence[Configuration],
        limits: Limits | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.replay, self.limits = replay, limits or Limits(max(CLIENTS))
        self.configurations = list({c.id: c for c in (AUTOREGRESSIVE, *configurations)}.values())
        self.observer = observer or Observer()
        self.engine = Engine(pair, limits=self.limits)
        self.observer.stage("measuring steps")
        self._steps = StepMeasurer(pair, self.limits.slots)
        self._steps.measure()
        before = self._steps.measured().times
        self._runs = engine_runs(pair, before, self.limits.slots, self.observer)

    def with_clients(self, clients: Sequence[int] = CLIENTS, repeats: int = 3) -> LoadCheck:
        """Answer the prompts with 1, 4, … clients under each configuration, in turns."""
        check, distinct = LoadCheck(self.configurations), self.configurations
        self.observer.stage("answering prompts", len(clients) * repeats * len(distinct))
        for count in clients:
            number = max(_EACH * count, _LEAST)
            requests = _requests(self.replay, number)
            self._steps.forget()
            for repeat in range(repeats):
                for configuration in distinct:
                    self.engine.configure(configuration)
                    if not repeat:  # steps of a new shape compile their kernels
                        run_clients(self.engine, requests, count)
                    self._steps.measure()
                    live = measure(run_clients(self.engine, requests, count).records)
                    check.live.setdefault((count, configuration.id), []).append(live)
                    self.observer.step()
            times = self._times()
            for configuration in distinct:
                answers = replayed_answers(self.replay, configuration)
                asks = asks_of(answers, number)
                limits = self.limits.verifying(configuration.candidates)
                simulation = simulate_clients(StepCosts(answers, times), asks, count, limits)
                check.simulated[count, configuration.id] = simulation.measure()
        return check

    def at_rates(
        self, shares: Sequence[float] = SHARES, number: int = REQUESTS, repeats: int = 3
    ) -> ArrivalCheck:
        """Measure how many requests a second fill all slots under each configuration, and answer
        `number` requests that come at random at shares of that rate, in turns; the simulation's
        come at the same times."""
        check, distinct = ArrivalCheck(self.configurations), self.configurations
        stages = len(distinct) * (1 + len(shares) * repeats)
        self.observer.stage("answering requests that come at random", stages)
        requests = _requests(self.replay, number)
        for configuration in distinct:
            check.capacity[configuration.id] = self._capacity(configuration)
            self.observer.step()
        for share in shares:
            coming = {
                c.id: arrival_times(share * check.capacity[c.id], number).tolist() for c in distinct
            }
            self._steps.forget()
            for _ in range(repeats):
                for configuration in distinct:
                    self.engine.configure(configuration)
                    self._steps.measure()
                    run = run_arrivals(self.engine, requests, coming[configuration.id])
                    key = share, configuration.id
                    check.live.setdefault(key, []).append(measure(run.records))
                    self.observer.step()
            times = self._times()
            for configuration in distinct:
                answers = replayed_answers(self.replay, configuration)
                asks, at = asks_of(answers, number), coming[configuration.id]
                limits = self.limits.verifying(configuration.candidates)
                simulation = simulate_arrivals(StepCosts(answers, times), asks, at, limits)
                check.simulated[share, configuration.id] = simulation.measure()
        return check

    def _capacity(self, configuration: Configuration) -> float:
        """Requests a second that are answered while all slots are busy (Little's law)."""
        slots = self.limits.slots
        filling = _requests(self.replay, max(_EACH * slots, _LEAST))
        self.engine.configure(configuration)
        run_clients(self.engine, filling, slots)  # steps of a new shape compile their kernels
        full = run_clients(self.engine, filling, slots).records
        return slots / float((full["last"] - full["sent"]).mean())

    def _times(self) -> StepTimes:
        """From the passes among the live runs."""
        return self._steps.measured(self._runs).times


def _requests(replay: Replay, number: int) -> list[Request]:
    """So many requests: the recorded prompts in their order, again and again."""
    prompts, tokens = replay.recording.prompts.tokens, replay.header.max_new_tokens
    places = [n % len(prompts) for n in range(number)]
    return [
        Request(str(n), tuple(prompts[place].tolist()), tokens) for n, place in enumerate(places)
    ]
