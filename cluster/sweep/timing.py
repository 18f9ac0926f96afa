"""One process that measures alone: forward times, finalists against each other, the oracle.

Times depend on load, so nothing else of a sweep runs meanwhile.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import pandas as pd
import ray
import torch
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.session import get, start_actor
from specdec_core.base.environment import environment
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration, PairSpec
from specdec_core.cost import Profile
from specdec_core.cost.steps import StepTimes
from specdec_core.drafting.drafter import Drafter
from specdec_core.engine import Engine, Request
from specdec_core.engine.turns import requests_of
from specdec_core.measure.comparison import interleaved
from specdec_core.measure.profiling import measure_policies, profile_pair
from specdec_core.measure.step_times import measure_steps
from specdec_core.models.alignment import Trajectory, measure_alignment
from specdec_core.models.pair import load_pair
from specdec_core.prompts.conversation import Conversation
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.search.load.live import EngineTimer
from specdec_core.search.load.traffic import Traffic
from specdec_core.search.load.workload import Load
from specdec_core.search.results import OraclePoint, Timing, for_as_many_tokens, timed_together
from specdec_core.tokens.statistics import Generation, Ratio, paired_ratio

WARM_UP_TOKENS = 8
AT_ONCE = 5.0  # seconds in which an unused node can be reserved
ALONE_SECONDS = 600.0  # that a measurement waits for other work to leave its node


class Bench:
    """The measuring process. Run as a Ray actor (:func:`start_bench`), so that it gets the hardware
    that trials get and no thread of the driver disturbs it."""

    def __init__(self, spec: PairSpec) -> None:
        self.pair = load_pair(spec)
        self.engine = Engine(self.pair)
        self.drafters: dict[str, Drafter | None] = {}  # by configuration id

    def node(self) -> str:
        """The id of the cluster's node that this runs on."""
        return ray.get_runtime_context().get_node_id()

    def cores(self) -> list[int]:
        """The CPU cores that this process may run on."""
        return sorted(os.sched_getaffinity(0))

    def stay_on(self, cores: Sequence[int]) -> None:
        """Run on these CPU cores only."""
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)

    def spec(self) -> PairSpec:
        """The pair with concrete device and data types."""
        return self.pair.spec

    def requests(self, prompts: Sequence[Prompt], max_new_tokens: int) -> tuple[Request, ...]:
        """Requests for the prompts, of a conversation for each turn; raises :class:`UserError` for
        a prompt that the pair cannot take."""
        return tuple(self._requests(prompts, max_new_tokens, 0))

    def fitting(
        self, prompts: Sequence[Prompt], max_new_tokens: int, first: int
    ) -> tuple[Request, ...]:
        """Requests for those prompts that the pair can take; seeds count from `first`."""
        requests: list[Request] = []
        for prompt in prompts:
            with suppress(UserError):
                requests += self._requests([prompt], max_new_tokens, first)
            first += Conversation(prompt, self.pair.tokenizer).turns
        return tuple(requests)

    def _requests(
        self, prompts: Sequence[Prompt], max_new_tokens: int, first: int
    ) -> list[Request]:
        engine = self.engine
        requests = requests_of(prompts, self.pair, max_new_tokens, first, engine)
        for request in requests:
            try:
                request.check(engine.max_length, engine.vocab_size, engine.scheduler.limits)
            except UserError as error:
                raise UserError(f"prompt {request.id}: {error}") from None
        return requests

    def fingerprints(self) -> dict[str, str]:
        """The digest of each model's weights."""
        return self.pair.fingerprints

    def environment(self) -> dict[str, str]:
        """Code, hardware and library versions here."""
        return environment()

    def profile(self, configurations: Sequence[Configuration], **options: Any) -> Profile:
        """Measure the cost of forwards, and of the policies of `configurations`."""
        profile = profile_pair(self.pair, **options)
        priced = [each.priced(profile) for each in configurations]
        policies = measure_policies(self.pair, priced)
        return profile.model_copy(update={"policies": policies})

    def warm_up(self, configurations: Sequence[Configuration], request: Request) -> None:
        """Run each configuration for a moment, untimed."""
        tokens = min(WARM_UP_TOKENS, request.max_new_tokens)
        short = Request("warm-up", request.tokens, tokens)
        for configuration in configurations:
            self.decode(configuration, short)
        gc.collect()
        gc.freeze()

    def forget(self) -> None:
        """Drop everything that drafters and policies have learned from earlier requests."""
        self.drafters.clear()

    def decode(self, configuration: Configuration, request: Request) -> tuple[float, Generation]:
        """Decode one request alone; returns its seconds and generation. A drafter keeps what it has
        learned from the configuration's earlier requests."""
        self.engine.configure(configuration, self.drafters.get(configuration.id))
        self.drafters[configuration.id] = self.engine.drafter
        start = perf_counter()
        (generation,) = self.engine.generate([request])
        return perf_counter() - start, generation

    def step_times(self, slots: int) -> StepTimes:
        """Measure what steps over up to so many requests take."""
        return measure_steps(self.pair, slots).times

    def take_workload(self, traffic: Traffic) -> None:
        """Get ready to answer a workload's requests."""
        self.load_timer = EngineTimer(self.pair, traffic)

    def warm_up_load(self, configuration: Configuration, load: Load) -> None:
        """Answer some requests of a load, untimed."""
        self.load_timer.warm_up(configuration, load)

    def answer(self, configuration: Configuration, load: Load) -> pd.DataFrame:
        """Records of the requests of a load."""
        return self.load_timer.answer(configuration, load)

    def oracles(
        self, profile: Profile, requests: Sequence[Request], outputs: Sequence[Sequence[int]]
    ) -> list[OraclePoint]:
        """The oracle of each draft (SpecDec++, Thm 4.1) on the target's greedy `outputs`: one
        teacher-forced pass gives the positions where the draft would be rejected."""
        device = self.pair.target.device
        trajectories = [
            Trajectory(torch.tensor([*request.tokens, *output], device=device), len(request.tokens))
            for request, output in zip(requests, outputs, strict=True)
        ]
        points = []
        for name, draft in self.pair.draft_models.items():
            disagreements = [
                measure_alignment(self.pair.target, draft, [trajectory]).disagreements
                for trajectory in trajectories
            ]
            counts, speedup = profile.oracle(disagreements, [len(o) for o in outputs], name)
            rate = counts.metrics()["verification_rate"]
            points.append(OraclePoint(draft=name, verification_rate=rate, speedup=speedup))
        return points


def start_bench(spec: PairSpec, gpus: float, node: str | None = None) -> ray.actor.ActorHandle:
    """A loaded bench, on `node` if that is still there. It reserves no CPU: it is idle while trials
    run, and :func:`alone` reserves its node while it measures."""
    node = node or (None if gpus else _bench_node(spec.runner.threads))
    where = NodeAffinitySchedulingStrategy(node, soft=True) if node else "DEFAULT"
    actor = start_actor(Bench, spec, num_cpus=0, num_gpus=gpus, scheduling_strategy=where)
    get(actor.spec.remote())
    return actor


def lost(bench: ray.actor.ActorHandle) -> bool:
    """Whether the bench is gone, with its process or its node."""
    try:
        ray.get(bench.node.remote())
    except RayActorError:
        return True
    return False


def _bench_node(threads: int) -> str | None:
    """A node with as many cores, preferably the driver's; a head often has none for workers."""
    fitting = {n["NodeID"] for n in _nodes() if n["Resources"].get("CPU", 0) >= threads}
    here = ray.get_runtime_context().get_node_id()
    return here if here in fitting else min(fitting, default=None)


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


@contextmanager
def alone(
    bench: ray.actor.ActorHandle,
    gpus: float,
    observer: Observer,
    held: Mapping[str, float] | None = None,
) -> Iterator[None]:
    """Reserve every core of the bench's node, and of those on which the caller has `held` some (by
    node), except these, while the block measures, so that no other work of Ray runs there: another
    sweep's trials, a recording, a training. Waits for running work, ten minutes at most, and
    reports it. A bench on a GPU has that to itself already."""
    left = {} if gpus else left_cores(_nodes(), {get(bench.node.remote()): 0, **(held or {})})
    if not left:
        yield
        return
    hold = placement_group(
        [{"CPU": cores} for cores in left.values()],
        bundle_label_selector=[{"ray.io/node-id": node_id} for node_id in left],
    )
    try:
        if not hold.wait(AT_ONCE):
            addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in _nodes()}
            where = ", ".join(addresses.get(node_id, node_id) for node_id in left)
            observer.stage(f"waiting for others to leave {where}")
            if not hold.wait(ALONE_SECONDS):
                observer.warned(f"times are taken beside other work on {where}")
        yield
    finally:
        remove_placement_group(hold)


def left_cores(nodes: Sequence[dict[str, Any]], held: Mapping[str, float]) -> dict[str, float]:
    """The cores of each node of which some may be `held`, by node, that are not; none of a node
    that is held as a whole."""
    cores = {node["NodeID"]: node["Resources"].get("CPU", 0) for node in nodes}
    left = {node_id: cores.get(node_id, 0) - number for node_id, number in held.items()}
    return {node_id: number for node_id, number in left.items() if number > 0}


class Timer(Protocol):
    """Decodes requests alone, one after the other, under one configuration or another."""

    def warm_up(self, configurations: Sequence[Configuration], request: Request) -> None:
        """Run each configuration for a moment, untimed."""

    def decode(self, configuration: Configuration, request: Request) -> tuple[float, Generation]:
        """Seconds and output of a request; a drafter keeps what it learns from it."""

    def forget(self) -> None:
        """Drop everything that drafters have learned."""


@dataclass(frozen=True)
class RemoteTimer:
    """A timer on a bench (:class:`Bench`)."""

    bench: ray.actor.ActorHandle

    def warm_up(self, configurations: Sequence[Configuration], request: Request) -> None:
        get(self.bench.warm_up.remote(list(configurations), request))

    def decode(self, configuration: Configuration, request: Request) -> tuple[float, Generation]:
        decoded: tuple[float, Generation] = get(self.bench.decode.remote(configuration, request))
        return decoded

    def forget(self) -> None:
        get(self.bench.forget.remote())


def in_turns(
    timer: Timer, configurations: Sequence[Configuration], request: Request, turn: int
) -> Iterator[tuple[Configuration, float, Generation]]:
    """Seconds and output of `request` under every configuration, one after the other. Each turn
    begins with another one, so that none always runs after the same."""
    for configuration in interleaved(configurations, turn):
        yield configuration, *timer.decode(configuration, request)


@dataclass
class InterleavedTimes:
    """Interleaved times of some configurations: seconds [repeat][prompt] and the first repeat's
    generations [prompt], by configuration id. `passes` says which pass over the prompts each repeat
    was, where not everybody took part in all."""

    seconds: dict[str, list[list[float]]] = field(default_factory=dict)
    generations: dict[str, list[Generation]] = field(default_factory=dict)
    turns: int = 0
    passes: dict[str, list[int]] = field(default_factory=dict)

    def outputs(self, configuration: Configuration) -> list[list[int]]:
        """The outputs of `configuration`: tokens [prompt][position]."""
        return [generation.tokens for generation in self.generations[configuration.id]]

    def take(
        self, timer: Timer, configurations: Sequence[Configuration], request: Request, repeat: int
    ) -> None:
        """Time `request` under every configuration."""
        for who, seconds, generation in in_turns(timer, configurations, request, self.turns):
            rows = self.seconds.setdefault(who.id, [])
            if len(rows) == repeat:
                rows.append([])
            rows[repeat].append(seconds)
            if repeat == 0:
                self.generations.setdefault(who.id, []).append(generation)
        self.turns += 1

    def timing(self, configuration: Configuration, baseline: Configuration) -> Timing:
        """The timing of `configuration`, as a speedup over `baseline`."""
        outputs = self.outputs(configuration)
        seconds = np.array(self.seconds[configuration.id])
        tokens = [len(output) for output in outputs]
        if configuration == baseline:
            ratio = Ratio(1.0, 1.0, 1.0)
        else:
            ratio = self.compare(baseline, configuration)
        differing = 0
        if configuration.sampling.greedy:
            pairs = zip(outputs, self.outputs(baseline), strict=True)
            differing = sum(output != expected for output, expected in pairs)
        return Timing(
            config_id=configuration.id,
            seconds=seconds.tolist(),
            passes=self.passes.get(configuration.id, []),
            tokens=tokens,
            reading=self._reading(configuration),
            speedup=ratio.value,
            low=ratio.low,
            high=ratio.high,
            tokens_per_second=sum(tokens) / float(np.median(seconds, axis=0).sum()),
            differing_outputs=differing,
        )

    def compare(self, baseline: Configuration, candidate: Configuration) -> Ratio:
        """How many times faster `candidate` is. Where outputs differ in length (sampling, or a
        flipped near-tie), its times are for the baseline's number of tokens."""
        written, wanted = (
            [len(output) for output in self.outputs(c)] for c in (candidate, baseline)
        )
        before, after = timed_together(
            *(self.seconds[baseline.id], self.passes.get(baseline.id, [])),
            *(self.seconds[candidate.id], self.passes.get(candidate.id, [])),
        )
        reading = self._reading(candidate)
        return paired_ratio(before, for_as_many_tokens(after, reading, written, wanted))

    def _reading(self, configuration: Configuration) -> list[float]:
        """Seconds to the first token [prompt]."""
        return [g.prefill_seconds for g in self.generations[configuration.id]]
