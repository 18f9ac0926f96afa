"""The time of decoding by part of the round, and by function."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Event, Thread, get_ident
from time import perf_counter
from types import FrameType

import pandas as pd

from specdec_core.tokens.statistics import Generation, Round

# The fields of :class:`Round` with the seconds of its parts.
PARTS = {
    "draft forwards": "draft_forward_seconds",
    "target forward": "target_forward_seconds",
    "verification": "verify_seconds",
    "policy": "policy_seconds",
    "bookkeeping": "bookkeeping_seconds",
}
FORWARDS = ("draft forwards", "target forward")

Stack = tuple[str, ...]  # functions, the outermost first


def split(generations: Iterable[Generation]) -> pd.DataFrame:
    """How the rounds of `generations` after their first, which reads the prompt, divide their time:
    a row for each of :data:`PARTS`, with its
    `seconds`, its `share` of all, and microseconds of a mean round, `per_round`, and of a mean
    token, `per_token`.

    Decoded in batches, a step counts for each slot that was part of it.
    """
    rounds = [r for generation in generations for r in generation.rounds[1:]]
    tokens = sum(r.generated for r in rounds)
    seconds = {part: _total(rounds, name) for part, name in PARTS.items()}
    table = pd.DataFrame({"seconds": seconds}).rename_axis("part")
    table["share"] = table["seconds"] / max(table["seconds"].sum(), sys.float_info.min)
    table["per_round"] = 1e6 * table["seconds"] / max(len(rounds), 1)
    table["per_token"] = 1e6 * table["seconds"] / max(tokens, 1)
    return table


def beyond_forwards(table: pd.DataFrame) -> float:
    """The share of everything but the forwards in what :func:`split` returned."""
    return float(table["share"].drop(list(FORWARDS)).sum())


def _total(rounds: Iterable[Round], name: str) -> float:
    return float(sum(getattr(r, name) for r in rounds))


def sample_stacks(run: Callable[[], object], interval: float = 1e-3) -> dict[Stack, float]:
    """Call `run` and sample its stack every `interval` seconds; returns the seconds of each stack
    of functions, from those that `run` calls on."""
    seen: Counter[Stack] = Counter()
    watched, over = get_ident(), Event()
    top: FrameType | None = None

    def call() -> None:
        nonlocal top
        top = sys._getframe()
        run()

    def watch() -> None:
        while not over.wait(interval):
            frame = sys._current_frames().get(watched)
            if frame is not None and (stack := _stack(frame, top)):
                seen[stack] += 1

    watcher = Thread(target=watch, name="sampler", daemon=True)
    with _switching(1e-6):
        watcher.start()
        start = perf_counter()
        try:
            call()
        finally:
            seconds = perf_counter() - start
            over.set()
            watcher.join()
    samples = max(seen.total(), 1)
    return {stack: seconds * count / samples for stack, count in seen.items()}


@contextmanager
def _switching(interval: float) -> Iterator[None]:
    """Threads switch after `interval`. With the usual 5 ms the sampler would run mostly where
    native code releases the interpreter, and would see little else."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def _stack(frame: FrameType | None, top: FrameType | None) -> Stack:
    """The functions between `top` and `frame`; none where `frame` is not below `top`."""
    names: list[str] = []
    while frame is not None and frame is not top:
        module = frame.f_globals.get("__name__", "?")
        names.append(f"{module}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    return () if frame is None else tuple(reversed(names))
