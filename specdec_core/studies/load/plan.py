"""What a comparison of servers under load measures."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from pydantic import Field, PositiveInt

from specdec_core.base.errors import UserError
from specdec_core.models.pair import Pair
from specdec_core.prompts.conversation import conversations
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.search.plan import PromptSource
from specdec_core.studies.bench.benchmark import BenchPlan
from specdec_core.studies.load.requests import LoadRequest

GREEDY = (0.0,)


class LoadPlan(BenchPlan):
    """A benchmark over HTTP: at each number of `clients`, each of which sends its next request when
    its last is answered, `requests` requests go to a server that was started for them. It decodes
    up to `slots` of them together; unset, as many as there are clients. `requests` unset, each
    client sends as many: `waves`, or more where there would be fewer than `least`."""

    prompts: PromptSource = PromptSource()
    repeats: PositiveInt = 2
    peers: tuple[str, ...] = ("vllm",)
    clients: tuple[PositiveInt, ...] = Field(default=(1, 4, 8, 16), min_length=1)
    requests: PositiveInt | None = None
    waves: PositiveInt = 3
    least: PositiveInt = 24
    slots: PositiveInt | None = None

    def count(self, clients: int) -> int:
        """Requests of a run."""
        if self.requests is not None:
            return self.requests
        return clients * max(self.waves, ceil(self.least / clients))

    @property
    def warm_up(self) -> int:
        """Prompts that are set aside to warm servers up, one for each client."""
        return max(self.clients)

    @property
    def needed(self) -> int:
        """Prompts that the largest run needs, none of them twice."""
        return self.warm_up + max(map(self.count, self.clients))

    def check(self) -> None:
        """Raises :class:`UserError` for what cannot be measured under load."""
        if len(set(self.clients)) < len(self.clients):
            raise UserError("--clients: a number of clients is given twice")
        if self.temperatures != GREEDY:
            raise UserError("--clients: servers are compared greedily: leave --temperature out")
        for clients in self.clients:
            if self.count(clients) < clients:
                raise UserError(
                    f"--requests {self.requests}: fewer than the {clients} clients that send them"
                )

    def workload(self, prompts: Sequence[Prompt], pair: Pair) -> list[LoadRequest]:
        """A request for each prompt, of conversations their first turn, as token ids so that all
        servers read the same. Raises :class:`UserError` for prompts that are too few or do not
        fit."""
        if len(prompts) < self.needed:
            raise UserError(
                f"{self.prompts.source}: {len(prompts)} prompts, but {max(self.clients)} clients"
                f" need {self.needed}, {self.warm_up} of them to warm up: no prompt is sent twice"
                " to a server; give more prompts, or fewer --requests or --clients"
            )
        texts = conversations(prompts, pair.tokenizer, self.max_new_tokens, pair.max_length)
        return [LoadRequest(text.tokens([]), self.max_new_tokens) for text in texts]
