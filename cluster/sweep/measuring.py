"""The measuring process of a sweep: forward times, decoded requests, loads, the oracle."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.placement import Placed, place
from cluster.session import Remote, alive_nodes, start_actor
from cluster.sharded_target.sharded_pair import load_sharded
from specdec_core.base.environment import environment, machine
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairSpec, Placement
from specdec_core.cost import Profile
from specdec_core.drafting.drafter import Drafter
from specdec_core.engine import Engine, Request
from specdec_core.engine.turns import requests_of
from specdec_core.measure.profiling import measure_policies, profile_pair
from specdec_core.models.pair import load_pair
from specdec_core.prompts.conversation import Conversation
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.search.load.live import EngineTimer
from specdec_core.search.load.records import LoadRun
from specdec_core.search.load.traffic import Traffic
from specdec_core.search.load.workload import Load
from specdec_core.tokens.statistics import Generation

WARM_UP_TOKENS = 8


class MeasuringProcess:
    """What measures in a sweep. Run as a Ray actor (:func:`open_measuring`), so that it gets the
    hardware that trials get and no thread of the driver disturbs it. Its models are on the devices
    that are `placed`, if any."""

    def __init__(self, spec: PairSpec, placed: Placed | None = None) -> None:
        self.pair = load_pair(spec) if placed is None else load_sharded(spec, placed)
        self.engine = Engine(self.pair)
        self.drafters: dict[str, Drafter | None] = {}  # by configuration id

    def node(self) -> str:
        """The id of the cluster's node that this runs on."""
        return ray.get_runtime_context().get_node_id()

    def spec(self) -> PairSpec:
        """The pair with concrete device and data types."""
        return self.pair.spec

    def fitting(
        self, prompts: Sequence[Prompt], max_new_tokens: int, first: int
    ) -> tuple[Request, ...]:
        """Requests for those prompts that the pair can take; seeds count from `first`."""
        requests: list[Request] = []
        for prompt in prompts:
            with suppress(UserError):
                requests += self.requests([prompt], max_new_tokens, first)
            first += Conversation(prompt, self.pair.tokenizer).turns
        return tuple(requests)

    def requests(
        self, prompts: Sequence[Prompt], max_new_tokens: int, first: int = 0
    ) -> tuple[Request, ...]:
        """Requests for the prompts, of a conversation for each turn, with seeds from `first`;
        raises :class:`UserError` for a prompt that the pair cannot take."""
        engine = self.engine
        requests = requests_of(prompts, self.pair, max_new_tokens, first, engine)
        for request in requests:
            try:
                request.check(engine.max_length, engine.vocab_size)
            except UserError as error:
                raise UserError(f"prompt {request.id}: {error}") from None
        return tuple(requests)

    def fingerprints(self) -> dict[str, str]:
        """The digest of each model's weights."""
        return self.pair.fingerprints

    def environment(self) -> dict[str, str]:
        """Code, hardware and library versions here."""
        return environment()

    def machine(self) -> dict[str, str]:
        """What the times that are measured here depend on."""
        return machine()

    def profile(self, configurations: Sequence[Configuration], **options: Any) -> Profile:
        """Measure the cost of forwards, and of the policies of `configurations`."""
        profile = profile_pair(self.pair, **options)
        priced = [each.priced(profile) for each in configurations]
        policies = measure_policies(self.pair, priced)
        return profile.model_copy(update={"policies": policies})

    # One request at a time (:class:`cluster.sweep.racing.Timer`).

    def prepare(self, configurations: Sequence[Configuration], request: Request) -> None:
        """Run each configuration for a moment, untimed."""
        tokens = min(WARM_UP_TOKENS, request.max_new_tokens)
        short = Request("warm-up", request.tokens, tokens)
        for configuration in configurations:
            self._configure(configuration)
            self.engine.generate([short])
        gc.collect()
        gc.freeze()

    def forget(self) -> None:
        """Drop everything that drafters and policies have learned from earlier requests."""
        self.drafters.clear()

    def decode(self, configuration: Configuration, request: Request) -> tuple[float, Generation]:
        """Decode one request alone; returns its seconds and generation. The drafter learns
        from one request of the configuration to the next. Raises :class:`CacheLost` where a process
        of the models was lost meanwhile."""
        self._configure(configuration)
        start = perf_counter()
        with self.pair.undisturbed():
            (generation,) = self.engine.generate([request])
        return perf_counter() - start, generation

    def _configure(self, configuration: Configuration) -> None:
        self.engine.configure(configuration, self.drafters.get(configuration.id))
        self.engine.wait_for_draft()  # it may have been lost since the last request
        self.drafters[configuration.id] = self.engine.drafter

    # A workload (:class:`specdec_core.search.load.live_race.LoadTimer`).

    def take_workload(self, traffic: Traffic) -> None:
        """Get ready to answer a workload's requests."""
        self.load_timer = EngineTimer(self.pair, traffic)

    def answer(self, configuration: Configuration, load: Load) -> LoadRun:
        """Answer the requests of a load; errors as for :meth:`decode`."""
        with self.pair.undisturbed():
            return self.load_timer.answer(configuration, load)


@contextmanager
def open_measuring(
    spec: PairSpec, placement: Placement | None, gpus: float, node: str | None = None
) -> Iterator[tuple[Remote, Placed | None]]:
    """A loaded measuring process, with its models on the devices of `placement`, which are yielded
    too; or else on `node` if that is still alive, with `gpus`. It reserves no CPU beside its
    devices: it is idle while trials run, and :func:`cluster.sweep.alone.alone` reserves its nodes
    while it measures."""
    placed = None if placement is None else place(placement)
    if placed is not None:
        gpus = 0  # its models have processes of their own
    elif not gpus:
        node = node or _measuring_node(spec.runner.threads)
    where = NodeAffinitySchedulingStrategy(node, soft=True) if node else "DEFAULT"
    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": gpus, "scheduling_strategy": where}
    measuring = Remote(start_actor(MeasuringProcess, spec, placed, **options))
    try:
        measuring.spec()
        yield measuring, placed
    finally:
        measuring.kill()
        if placed is not None:
            placed.remove()


def _measuring_node(threads: int) -> str | None:
    """A node with at least `threads` cores, preferably the driver's. A head node often has no cores
    for workers."""
    nodes = {n["NodeID"] for n in alive_nodes() if n["Resources"].get("CPU", 0) >= threads}
    here = ray.get_runtime_context().get_node_id()
    return here if here in nodes else min(nodes, default=None)
