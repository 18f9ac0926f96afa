"""Measuring asynchronous drafting: PEARL against the chains of one process, interleaved."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from cluster.placed_bench import placed_bench
from cluster.session import Remote, on_node, start_actor
from cluster.sweep.bench import Bench
from research.overlap.study import ONE, PEARL, TWO, Overlap, OverlapContestant
from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration, PairSpec, Placement
from specdec_core.engine import Request


def compare_overlap(
    spec: PairSpec,
    placement: Placement,
    chains: Sequence[Configuration],
    overlapping: Sequence[Configuration],
    requests: Callable[[Remote], Sequence[Request]],
    repeats: int,
    observer: Observer | None = None,
) -> Overlap:
    """Time `chains` in a process of one thread, on the target's core, and in one of two threads,
    and `overlapping` configurations on the devices of `placement`, request by request in turns. Ray
    must be running."""
    observer = observer or Observer()
    observer.stage("loading the pair, three times")
    with placed_bench(spec, placement) as (pearl, _):
        resolved = pearl.spec()
        here = on_node(pearl.node())
        one = Remote(start_actor(Bench, resolved, **here))
        two_threads = resolved.runner.model_copy(update={"threads": 2})
        # Cores are equal only where nothing else uses them.
        one.__ray_call__(_stay_on, pearl.__ray_call__(_cores))
        two = Remote(
            start_actor(Bench, resolved.model_copy(update={"runner": two_threads}), **here)
        )
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
                bench.prepare(configurations, request)
        observer.stage("in turns", repeats * len(decoded) * len(contestants))
        for repeat in range(repeats):
            for _, bench in tried:
                bench.forget()
            _take_turns(contestants, decoded, repeat, observer)
        spans = pearl.record(overlapping[0], decoded[0])
        for bench in (one, two):
            bench.kill()
    return Overlap(resolved, contestants, spans)


def _cores(bench: Bench) -> list[int]:
    """The CPU cores that the bench's process may run on."""
    return sorted(os.sched_getaffinity(0))


def _stay_on(bench: Bench, cores: Sequence[int]) -> None:
    """Run on these CPU cores only."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


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
            seconds, generation = contestant.bench.decode(contestant.configuration, request)
            contestant.seconds[repeat].append(seconds)
            if repeat == 0:
                contestant.generations.append(generation)
            observer.step()
