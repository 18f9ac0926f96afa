"""Measuring asynchronous drafting: PEARL against the chains of one process, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import ray

from cluster.devices import placed_spec
from cluster.draft_actor import LOADING, PlacedDraft
from cluster.placement import Placed, place
from cluster.session import get, on_node, start_actor
from cluster.sharded_target.sharded_pair import load_sharded
from cluster.sweep.timing import Bench
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration, PairSpec, Placement
from specdec_core.drafting.pearl.drafter import PearlDrafter
from specdec_core.drafting.pearl.link import Link, no_link
from specdec_core.drafting.pearl.timeline import Span, Timeline
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import load_pair
from specdec_core.studies.overlap import ONE, PEARL, TWO, Contestant, Overlap


class Overlapping(Bench):
    """A bench with the target on the devices placed for it, and the draft on another."""

    def __init__(self, spec: PairSpec, placed: Placed) -> None:
        if placed.placement.target.devices == 1:
            self.pair = load_pair(placed_spec(spec))
        else:
            self.pair = load_sharded(spec, placed)
        open_link: Callable[[], Link] = no_link
        if placed.placement.draft.devices:
            open_link = PlacedDraft(placed, self.pair.spec).wait
        self.engine = Engine(self.pair, open_link=open_link)
        self.drafters = {}

    def warm_up(self, configurations: Sequence[Configuration], request: Request) -> None:
        """Also wait for the draft to have its graphs: until then decoding is autoregressive."""
        for configuration in configurations:
            if configuration.asynchronous:
                self.engine.configure(configuration)
                drafter = self.engine.drafter
                if drafter is None or not drafter.prepare(LOADING):
                    raise UserError(f"{configuration.label}: the draft did not get ready")
        super().warm_up(configurations, request)

    def record(self, configuration: Configuration, request: Request) -> list[Span]:
        """The spans of draft and target while `request` was decoded."""
        self.decode(configuration, request)
        timeline = self._drafter.timeline = Timeline()
        self.decode(configuration, request)
        self._drafter.timeline = None
        return list(timeline.spans)

    @property
    def _drafter(self) -> PearlDrafter:
        """The engine's drafter, of a PEARL configuration."""
        assert isinstance(self.engine.drafter, PearlDrafter)
        return self.engine.drafter


def compare_overlap(
    spec: PairSpec,
    placement: Placement,
    chains: Sequence[Configuration],
    overlapping: Sequence[Configuration],
    requests: Callable[[ray.actor.ActorHandle], Sequence[Request]],
    repeats: int,
    observer: Observer | None = None,
) -> Overlap:
    """Time `chains` in a process of one thread, on the target's core, and in one of two threads,
    and `overlapping` configurations on the devices of `placement`, request by request in turns. Ray
    must be running."""
    observer = observer or Observer()
    observer.stage("loading the pair, three times")
    with placed_bench(spec, placement) as (pearl, _):
        resolved = get(pearl.spec.remote())
        here = on_node(get(pearl.node.remote()))
        one = ray.remote(**here)(Bench).remote(resolved)
        two_threads = resolved.runner.model_copy(update={"threads": 2})
        # Cores are equal only where nothing else uses them.
        get(one.stay_on.remote(get(pearl.cores.remote())))
        two = ray.remote(**here)(Bench).remote(resolved.model_copy(update={"runner": two_threads}))
        baseline = AUTOREGRESSIVE.model_copy(update={"sampling": chains[0].sampling})
        tried = {
            (ONE, one): [baseline, *chains],
            (TWO, two): chains,
            (PEARL, pearl): overlapping,
        }
        contestants = [
            Contestant(name, bench, configuration)
            for (name, bench), configurations in tried.items()
            for configuration in configurations
        ]
        decoded = requests(one)
        for (name, bench), configurations in tried.items():
            observer.stage(f"warming up: {name}")
            for request in decoded[:2]:
                get(bench.warm_up.remote(configurations, request))
        observer.stage("in turns", repeats * len(decoded) * len(contestants))
        for repeat in range(repeats):
            for _, bench in tried:
                get(bench.forget.remote())
            _take_turns(contestants, decoded, repeat, observer)
        spans = get(pearl.record.remote(overlapping[0], decoded[0]))
        for bench in (one, two):
            ray.kill(bench)
    return Overlap(resolved, contestants, spans)


def _take_turns(
    contestants: Sequence[Contestant],
    requests: Sequence[Request],
    repeat: int,
    observer: Observer,
) -> None:
    """One repeat: all contestants decode a request before the next, each time another one first."""
    for contestant in contestants:
        contestant.seconds.append([])
    for number, request in enumerate(requests):
        shift = (repeat * len(requests) + number) % len(contestants)
        for contestant in [*contestants[shift:], *contestants[:shift]]:
            decoding = contestant.bench.decode.remote(contestant.configuration, request)
            seconds, generation = get(decoding)
            contestant.seconds[repeat].append(seconds)
            if repeat == 0:
                contestant.generations.append(generation)
            observer.step()


@contextmanager
def placed_bench(
    spec: PairSpec, placement: Placement
) -> Iterator[tuple[ray.actor.ActorHandle, Mapping[str, float]]]:
    """A loaded bench on the devices of `placement`, and how many CPU cores these take, by node."""
    placed = place(placement)
    try:
        # A target on several devices has a process on each; this one then needs none.
        alone = placement.target.devices == 1
        options = placed.options("target") if alone else {"num_cpus": 0}
        bench = start_actor(Overlapping, spec, placed, **options)
        get(bench.spec.remote())
        yield bench, placed.cores()
        ray.kill(bench)
    finally:
        placed.remove()
