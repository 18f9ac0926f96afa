"""The requests of a workload over recorded prompts: the same in simulation and on the engine."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Self

from specdec_core.config import PairSpec
from specdec_core.engine import Request
from specdec_core.engine.scheduler import Limits
from specdec_core.models.loading import load_tokenizer
from specdec_core.prompts.chat import AUTO, rendered
from specdec_core.prompts.conversation import Conversation
from specdec_core.prompts.prompt import Prompt
from specdec_core.recordings.schema import Recording
from specdec_core.search.load.simulator import (
    Simulation,
    shapes_of,
    simulate_arrivals,
    simulate_clients,
)
from specdec_core.search.load.step_costs import StepCosts
from specdec_core.search.load.trace import TraceRequest, read_trace
from specdec_core.search.load.workload import LiveSettings, Load, Workload, arrival_times


@dataclass(frozen=True)
class Traffic:
    """A workload of `prompts`, as tokens, taken in their order again and again. Answers have at
    most `new_tokens` tokens."""

    workload: Workload
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    limits: Limits  # of the engine
    trace: tuple[TraceRequest, ...] = ()

    @classmethod
    def of(cls, workload: Workload, recording: Recording) -> Self:
        """Over the prompts of a recording. Raises :class:`UserError` for a trace that cannot be
        read."""
        trace = (
            () if workload.trace is None else read_requests(workload.trace, recording.header.pair)
        )
        prompts = tuple(tuple(tokens.tolist()) for tokens in recording.prompts.tokens)
        limits = Limits(workload.slots)
        return cls(workload, prompts, recording.header.max_new_tokens, limits, trace)

    @property
    def loads(self) -> tuple[Load, ...]:
        """Each number of clients, in order; or the one load of an open loop."""
        workload = self.workload
        if workload.clients is not None:
            counts = sorted(set(workload.clients))
            return tuple(Load(clients=n, requests=workload.size(n)) for n in counts)
        return (Load(rate=workload.rate, requests=len(self.trace) or workload.size()),)

    def live_loads(self, live: LiveSettings) -> tuple[Load, ...]:
        """The same with as many requests as a live run has."""
        given = self.workload.requests
        return tuple(
            load.model_copy(update={"requests": live.size(load, given)}) for load in self.loads
        )

    def arrivals(self, load: Load) -> list[float]:
        """Seconds at which the requests of an open loop come."""
        if load.rate is None:
            return [request.arrival for request in self.trace[: load.requests]]
        kind, seed = self.workload.arrivals or "poisson", self.workload.seed
        return list(arrival_times(load.rate, load.requests, kind, seed).tolist())

    def simulate(self, costs: StepCosts, load: Load) -> Simulation:
        """The requests of a load by simulation."""
        trace = self.trace[: load.requests]
        shapes = shapes_of(costs.answers, load.requests, trace, self.new_tokens)
        if load.clients is not None:
            return simulate_clients(costs, shapes, load.clients, self.limits)
        return simulate_arrivals(costs, shapes, self.arrivals(load), self.limits)

    def requests(self, load: Load, tokenizer: Any) -> list[Request]:
        """The requests of a load for the live engine. Texts and chats of a trace are its own; where
        it tells their lengths alone, recorded prompts are cut or repeated. Raises
        :class:`UserError` for a chat that no template writes."""
        places = [n % len(self.prompts) for n in range(load.requests)]
        if not self.trace:
            return [
                Request(str(n), self.prompts[place], self.new_tokens, seed=place)
                for n, place in enumerate(places)
            ]
        return [
            Request(
                str(n),
                _own_tokens(asked, tokenizer)
                if asked.written
                else tuple(islice(cycle(self.prompts[place]), asked.prompt_tokens)),
                asked.most_tokens(self.new_tokens),
                seed=place,
                ignore_eos=asked.output_tokens is not None,
            )
            for n, (asked, place) in enumerate(zip(self.trace, places, strict=False))
        ]


def read_requests(path: str | Path, pair: PairSpec) -> tuple[TraceRequest, ...]:
    """The requests of a trace, all with `prompt_tokens`: texts and chats have as many as the pair's
    target reads. Raises :class:`UserError` as :func:`read_trace` does, and for a chat that no
    template writes."""
    trace = tuple(read_trace(path))
    if not any(asked.written for asked in trace):
        return trace
    tokenizer = load_tokenizer(pair.target)
    return tuple(
        asked.model_copy(update={"prompt_tokens": len(_own_tokens(asked, tokenizer))})
        if asked.written
        else asked
        for asked in trace
    )


def _own_tokens(asked: TraceRequest, tokenizer: Any) -> tuple[int, ...]:
    text = asked.prompt if asked.prompt is not None else asked.messages[-1].content
    plain = Prompt(f"at {asked.arrival:g} s", text, messages=asked.messages)
    [prompt] = rendered([plain], tokenizer, AUTO, "trace")
    return Conversation(prompt, tokenizer).tokens()
