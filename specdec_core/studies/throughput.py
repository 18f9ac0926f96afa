"""Tokens a second by the number of requests decoded together, with and without speculation.

A queue of more requests than slots keeps every slot busy until the queue is empty. The clock stops
when the first slot stays empty: it counts what comes before, prefill included, as on a busy server.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import pandas as pd

from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration, distinct_labels
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.statistics import Counts, Generation, Ratio, paired_ratio

SLOTS = (1, 2, 4, 8, 16)
WAVES = 3  # requests for each slot in a queue; the last is not counted in full
_LEAST = 6  # requests in a queue, however few the slots
_WARM_UP_TOKENS = 8

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Busy:
    """Time and tokens while all slots were busy."""

    seconds: float
    tokens: int


def decode_queue(engine: Engine, requests: Sequence[Request]) -> tuple[Busy, list[Generation]]:
    """Decode `requests`, at least as many as the engine has slots, and time the part in which all
    slots are busy."""
    for request in requests:
        engine.add(request)
    done: dict[str, Generation] = {}
    tokens, seconds, busy = 0, 0.0, True
    start = perf_counter()
    while not engine.idle:
        chunks = engine.step(texts=False)
        # Of many slots, some wait at first for their prompts to be read.
        busy = busy and (engine.status().waiting > 0 or engine.last.running == engine.slots)
        if busy:
            seconds = perf_counter() - start
            tokens += sum(len(chunk.tokens) for chunk in chunks)
        done |= {chunk.request_id: chunk.finished for chunk in chunks if chunk.finished}
    return Busy(seconds, tokens), [done[request.id] for request in requests]


def queues_of(
    prompts: Sequence[Tokens], slots: int, queues: int, new_tokens: int
) -> list[list[Request]]:
    """`queues` queues for `slots` slots, of prompts in random order, each once before any repeats;
    the same for the same arguments."""
    rng = random.Random(0)

    def endless() -> Iterator[Tokens]:
        while True:
            yield from rng.sample(prompts, len(prompts))

    source = endless()
    size = max(WAVES * slots, _LEAST)
    return [
        [Request(f"{queue}.{n}", next(source), new_tokens) for n in range(size)]
        for queue in range(queues)
    ]


@dataclass
class Throughput:
    """Interleaved runs of `configurations`, the first of which is the baseline, on the same queues
    at each of `slots`."""

    configurations: list[Configuration]
    slots: tuple[int, ...]
    # By slots and configuration id: [repeat][queue], and the first repeat's generations.
    runs: dict[tuple[int, str], list[list[Busy]]] = field(default_factory=dict)
    generations: dict[tuple[int, str], list[Generation]] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        """The configurations' labels by id."""
        return distinct_labels(self.configurations)

    def table(self) -> pd.DataFrame:
        """One row a number of slots and configuration: `tokens_per_second` of all slots together
        (medians over the repeats), `speedup` over the baseline at as many slots with its bootstrap
        interval `low` … `high`, `mat`, and `differing`, the outputs that are not the baseline's
        (near-ties in reduced precision)."""
        rows = []
        for slots in self.slots:
            baseline = slots, self.configurations[0].id
            for configuration in self.configurations:
                key = slots, configuration.id
                each = self._seconds_per_token(key)
                ratio = self.over(slots, configuration.id, baseline[1])
                alone = key == baseline
                pairs = zip(self.generations[key], self.generations[baseline], strict=True)
                rows.append(
                    {
                        "slots": slots,
                        "configuration": self.labels[configuration.id],
                        "config_id": configuration.id,
                        "tokens_per_second": float(1 / np.median(each, axis=0).mean()),
                        "speedup": ratio.value,
                        "low": 1.0 if alone else ratio.low,
                        "high": 1.0 if alone else ratio.high,
                        "mat": Counts.of(self.generations[key]).metrics()["mat"],
                        "differing": sum(ours.tokens != theirs.tokens for ours, theirs in pairs),
                    }
                )
        return pd.DataFrame(rows)

    def over(self, slots: int, config_id: str, other: str) -> Ratio:
        """How many times faster a configuration is than another one at as many slots."""
        return paired_ratio(
            self._seconds_per_token((slots, other)), self._seconds_per_token((slots, config_id))
        )

    def frame(self) -> pd.DataFrame:
        """One row a run: slots, configuration, repeat, queue, and the seconds and tokens of its
        busy part."""
        return pd.DataFrame(
            {
                "slots": slots,
                "configuration": self.labels[config_id],
                "config_id": config_id,
                "repeat": repeat,
                "queue": queue,
                "seconds": busy.seconds,
                "tokens": busy.tokens,
            }
            for (slots, config_id), repeats in self.runs.items()
            for repeat, row in enumerate(repeats)
            for queue, busy in enumerate(row)
        )

    def _seconds_per_token(self, key: tuple[int, str]) -> np.ndarray:
        """Shape (repeats, queues)."""
        return np.array([[busy.seconds / busy.tokens for busy in row] for row in self.runs[key]])


def stops_paying(table: pd.DataFrame, config_id: str) -> int | None:
    """The fewest slots at which a configuration of :meth:`Throughput.table` is no longer surely
    faster than the baseline: the interval of its speedup reaches 1. None where it always is."""
    unsure = table[(table["config_id"] == config_id) & (table["low"] <= 1)]
    return int(unsure["slots"].min()) if len(unsure) else None


def measure_throughput(
    pair: Pair,
    configurations: Iterable[Configuration],
    prompts: Sequence[Tokens],
    slots: Sequence[int] = SLOTS,
    repeats: int = 3,
    queues: int = 2,
    new_tokens: int = 64,
    observer: Observer | None = None,
) -> Throughput:
    """Decode the same queues autoregressively and under each of `configurations`, in turns, at each
    number of slots."""
    distinct = {c.id: c for c in (AUTOREGRESSIVE, *configurations)}
    result = Throughput(list(distinct.values()), tuple(sorted(set(slots))))
    turn = 0
    observer = observer or Observer()
    observer.stage("decoding queues", len(distinct) * len(result.slots) * repeats * queues)
    for count in result.slots:
        engine = Engine(pair, slots=count)
        waiting = queues_of(prompts, count, queues, new_tokens)
        for configuration in result.configurations:
            engine.configure(configuration)
            short = [Request(r.id, r.tokens, _WARM_UP_TOKENS) for r in waiting[0][:count]]
            engine.generate(short)
        for repeat in range(repeats):
            for requests in waiting:
                order = result.configurations
                shift, turn = turn % len(order), turn + 1
                for configuration in [*order[shift:], *order[:shift]]:
                    engine.configure(configuration)
                    busy, generations = decode_queue(engine, requests)
                    rows = result.runs.setdefault((count, configuration.id), [])
                    if len(rows) == repeat:
                        rows.append([])
                    rows[repeat].append(busy)
                    if repeat == 0:
                        result.generations.setdefault((count, configuration.id), []).extend(
                            generations
                        )
                    observer.step()
    return result
