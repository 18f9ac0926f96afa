"""What a comparison of servers under load measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import ceil

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from specdec_core.base.errors import UserError
from specdec_core.evidence.bench.benchmark import BenchPlan
from specdec_core.models.pair import Pair
from specdec_core.prompts.conversation import conversations
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.prompts.source import PromptSource
from specdec_core.search.load.records import LoadRequest
from specdec_core.search.load.workload import Load, Slo, arrival_times
from specdec_core.servers.table import names_of

GREEDY = (0.0,)
SLOTS = 16  # of a server to which requests come at a rate


class LoadPlan(BenchPlan):
    """A benchmark over HTTP. A server is started for each load, or with `one_server` for all loads,
    which then have different prompts.

    With n `clients` each client sends its next request when its last is answered: `waves` requests,
    or more where together there would be fewer than `least`. At each of `rates`, requests a second,
    `arrivals` requests come at random by `seed`. `requests` overrides both numbers. A server
    decodes up to `slots` requests together; unset, as many as there are clients, or 16 at a rate.
    `slo` are the limits that goodput counts by.
    """

    prompts: PromptSource = PromptSource()
    repeats: PositiveInt = 2
    peers: tuple[str, ...] = Field(default_factory=partial(names_of, "serve"))
    clients: tuple[PositiveInt, ...] = (1, 4, 8, 16)
    rates: tuple[PositiveFloat, ...] = ()
    slo: Slo | None = None
    seed: NonNegativeInt = 0
    requests: PositiveInt | None = None
    waves: PositiveInt = 3
    least: PositiveInt = 24
    arrivals: PositiveInt = 64
    slots: PositiveInt | None = None
    one_server: bool = False

    @property
    def loads(self) -> list[Load]:
        """The loads to measure: clients, then rates."""
        closed = [(n, n * max(self.waves, ceil(self.least / n))) for n in self.clients]
        return [
            *(Load(clients=n, requests=self.requests or count) for n, count in closed),
            *(Load(rate=rate, requests=self.requests or self.arrivals) for rate in self.rates),
        ]

    @property
    def groups(self) -> list[list[Load]]:
        """The loads that a started server answers."""
        return [self.loads] if self.one_server else [[load] for load in self.loads]

    def together(self, load: Load) -> int:
        """Requests that a server decodes together: its slots."""
        return self.slots or load.clients or SLOTS

    def warm_up(self, load: Load) -> int:
        """Requests that warm a server up, all at the same time."""
        return load.clients or self.together(load)

    @property
    def set_aside(self) -> int:
        """Prompts to warm servers up with."""
        return max(map(self.warm_up, self.loads))

    @property
    def needed(self) -> int:
        """Prompts that a started server needs at most; none is sent twice."""
        return self.set_aside + max(sum(load.requests for load in group) for group in self.groups)

    def check(self) -> None:
        """Raises :class:`UserError` for what cannot be measured under load."""
        if not self.loads:
            raise UserError("no load: give --clients or --rate")
        if len(set(self.clients)) < len(self.clients):
            raise UserError("--clients: a number of clients is given twice")
        if len(set(self.rates)) < len(self.rates):
            raise UserError("--rate: a rate is given twice")
        if self.temperatures != GREEDY:
            raise UserError("servers are compared greedily: leave --temperature out")
        for load in self.loads:
            if load.requests < (load.clients or 0):
                raise UserError(
                    f"{load.requests} requests are fewer than the {load.clients} clients that send"
                    " them"
                )

    def workload(self, prompts: Sequence[Prompt], pair: Pair) -> list[LoadRequest]:
        """A request for each prompt, of conversations their first turn, as token ids so that all
        servers get the same tokens. Raises :class:`UserError` for prompts that are too few or do
        not fit."""
        if len(prompts) < self.needed:
            most = max(self.groups, key=lambda group: sum(load.requests for load in group))
            loads = " and ".join(load.label for load in most)
            raise UserError(
                f"{self.prompts.source}: {len(prompts)} prompts, but {loads} need {self.needed},"
                f" {self.set_aside} of them to warm up: no prompt is sent twice"
                " to a server; give more prompts, or fewer requests, clients or slots"
            )
        texts = conversations(prompts, pair.tokenizer, self.max_new_tokens, pair.max_length)
        return [LoadRequest(text.tokens(), self.max_new_tokens) for text in texts]

    def requests_of(self, load: Load, workload: Sequence[LoadRequest]) -> list[LoadRequest]:
        """The measured requests of a workload: at a rate with arrival times, the same for all."""
        before = self.set_aside
        if self.one_server:
            before += sum(each.requests for each in self.loads[: self.loads.index(load)])
        measured = list(workload[before:][: load.requests])
        if load.rate is None:
            return measured
        arrivals = arrival_times(load.rate, len(measured), seed=self.seed).tolist()
        return [replace(r, arrival=at) for r, at in zip(measured, arrivals, strict=True)]
