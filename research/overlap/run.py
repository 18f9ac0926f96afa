"""Measuring asynchronous drafting: PEARL against the chains of one process, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ray

from cluster.placed_bench import placed_bench
from cluster.session import get, on_node
from cluster.sweep.timing import Bench
from research.overlap.study import ONE, PEARL, TWO, Overlap, OverlapContestant
from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration, PairSpec, Placement
from specdec_core.engine import Request


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
            OverlapContestant(name, bench, configuration)
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
    contestants: Sequence[OverlapContestant],
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
