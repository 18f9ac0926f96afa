"""Forwards of one target, whole and split over CPU cores, timed interleaved."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from cluster.placement import Placed
from cluster.sharded_target.sharded_pair import load_sharded
from cluster.sharded_target.sharded_runner import ShardedRunner
from specdec_core.base.observer import Observer
from specdec_core.config import PairSpec, Placement
from specdec_core.measure.profiling import fill
from specdec_core.models.runner import time_forward

Kind = tuple[str, str]  # eager or compiled, and an element of HOW
HOW = ("whole", "heads", "layers", "pipelined")


class Size(NamedTuple):
    rows: int
    tokens: int  # of each row


@dataclass
class Unreserved(Placed):
    """CPU cores that Ray does not reserve: groups that run one at a time share them. The locks of
    its processes' cores are in `folder`, so that each group has the same cores."""

    folder: str = ""

    def options(self, role: Literal["draft", "target"], rank: int = 0) -> dict[str, Any]:
        return {"num_cpus": 0, "runtime_env": {"env_vars": {"TMPDIR": self.folder}}}


@contextmanager
def opened(
    spec: PairSpec, devices: int, slots: int, observer: Observer
) -> Iterator[dict[str, ShardedRunner]]:
    """A runner of the target for each of :data:`HOW`: on one device, and split over `devices` by
    heads, by layers, and by layers with every forward of several rows pipelined."""
    runners: dict[str, ShardedRunner] = {}
    with ExitStack() as held:
        for how in ("whole", "heads", "layers"):
            observer.stage(f"starting {how}")
            folder = held.enter_context(tempfile.TemporaryDirectory())
            split = "layers" if how == "layers" else "heads"
            target = {"devices": 1 if how == "whole" else devices, "split": split}
            placement = Placement.model_validate({"draft": {"devices": 0}, "target": target})
            placed = Unreserved(placement, "CPU", folder=folder)
            pair = held.enter_context(closing(load_sharded(spec, placed)))
            runners[how] = pair.open_runner(None, slots)
            runners[how].pipelined_from = sys.maxsize
        runners["pipelined"] = pair.open_runner(None, slots)
        runners["pipelined"].pipelined_from = 0
        yield runners


def time_sizes(
    runners: Mapping[Kind, ShardedRunner],
    sizes: Sequence[Size],
    context: int,
    repeats: int,
    observer: Observer,
) -> dict[Size, dict[Kind, float]]:
    """The median seconds of each runner's forwards of each size, interleaved, after `context`
    tokens in each row. The first two repeats warm up."""
    for runner in runners.values():
        fill(runner, context)
    observer.stage("forwards", len(sizes))
    medians: dict[Size, dict[Kind, float]] = {}
    for size in sizes:
        seconds: dict[Kind, list[float]] = defaultdict(list)
        for _ in range(repeats + 2):
            for kind, runner in runners.items():
                time_forward(runner, size.tokens, size.rows)  # its weights are back in the caches
                seconds[kind].append(time_forward(runner, size.tokens, size.rows))
        medians[size] = {kind: statistics.median(own[2:]) for kind, own in seconds.items()}
        observer.step()
    return medians
