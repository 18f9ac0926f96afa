"""What a comparison of servers under load measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from specdec_core.base.errors import UserError
from specdec_core.evidence.bench.benchmark import BenchPlan
from specdec_core.evidence.load.load import BenchLoad
from specdec_core.evidence.load.requests import LoadRequest
from specdec_core.models.pair import Pair
from specdec_core.prompts.conversation import conversations
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.search.load.workload import Slo, arrival_times
from specdec_core.search.plan import PromptSource

GREEDY = (0.0,)
SLOTS = 16  # of a server to which requests come at a rate


class LoadPlan(BenchPlan):
    """A benchmark over HTTP: at each number of `clients`, each of which sends its next request when
    its last is answered, and at each of `rates`, requests a second that come at random by `seed`,
    `requests` requests go to a server that was started for them. It decodes up to `slots` of them
    together; unset, as many as there are clients, or 16 at a rate. `requests` unset, each client
    sends as many: `waves`, or more where there would be fewer than `least`; at a rate there are
    `arrivals`. `slo` are the limits that goodput counts by. With `engine_alone` the engine of each
    of this library's servers is measured without it, too."""

    prompts: PromptSource = PromptSource()
    repeats: PositiveInt = 2
    peers: tuple[str, ...] = ("vllm",)
    clients: tuple[PositiveInt, ...] = (1, 4, 8, 16)
    rates: tuple[PositiveFloat, ...] = ()
    slo: Slo | None = None
    seed: NonNegativeInt = 0
    requests: PositiveInt | None = None
    waves: PositiveInt = 3
    least: PositiveInt = 24
    arrivals: PositiveInt = 64
    slots: PositiveInt | None = None
    engine_alone: bool = False

    @property
    def loads(self) -> list[BenchLoad]:
        """What servers are put under: clients, then rates."""
        closed = [BenchLoad(clients=clients) for clients in self.clients]
        return [*closed, *(BenchLoad(rate=rate) for rate in self.rates)]

    def count(self, load: BenchLoad) -> int:
        """Requests of a run."""
        if self.requests is not None:
            return self.requests
        if load.clients is None:
            return self.arrivals
        return load.clients * max(self.waves, ceil(self.least / load.clients))

    def together(self, load: BenchLoad) -> int:
        """Requests that a server decodes together: its slots."""
        return self.slots or load.clients or SLOTS

    def warm_up(self, load: BenchLoad) -> int:
        """Requests that warm a server up, all at the same time."""
        return load.clients or self.together(load)

    @property
    def set_aside(self) -> int:
        """Prompts to warm servers up with."""
        return max(map(self.warm_up, self.loads))

    @property
    def needed(self) -> int:
        """Prompts that the largest run needs, none of them twice."""
        return self.set_aside + max(map(self.count, self.loads))

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
        for clients in self.clients:
            if self.count(BenchLoad(clients=clients)) < clients:
                raise UserError(
                    f"--requests {self.requests}: fewer than the {clients} clients that send them"
                )

    def workload(self, prompts: Sequence[Prompt], pair: Pair) -> list[LoadRequest]:
        """A request for each prompt, of conversations their first turn, as token ids so that all
        servers read the same. Raises :class:`UserError` for prompts that are too few or do not
        fit."""
        if len(prompts) < self.needed:
            largest = max(self.loads, key=self.count)
            raise UserError(
                f"{self.prompts.source}: {len(prompts)} prompts, but {largest}"
                f" need {self.needed}, {self.set_aside} of them to warm up: no prompt is sent twice"
                " to a server; give more prompts, or fewer --requests, --clients or --slots"
            )
        texts = conversations(prompts, pair.tokenizer, self.max_new_tokens, pair.max_length)
        return [LoadRequest(text.tokens(), self.max_new_tokens) for text in texts]

    def requests_of(self, load: BenchLoad, workload: Sequence[LoadRequest]) -> list[LoadRequest]:
        """What is measured of a workload: with arrival times at a rate, the same for all."""
        measured = list(workload[self.set_aside :][: self.count(load)])
        if load.rate is None:
            return measured
        arrivals = arrival_times(load.rate, len(measured), seed=self.seed).tolist()
        return [replace(r, arrival=at) for r, at in zip(measured, arrivals, strict=True)]
