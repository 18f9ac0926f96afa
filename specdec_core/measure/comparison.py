"""The comparison of several contestants on the same requests, whether these are decoded one at a
time or under load: what a contestant is, how many times as fast it is as another, which is the best
of a group, and the order in which they run."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from pydantic import Field

from specdec_core.base.names import digest_name
from specdec_core.config import Configuration, Document, PairSpec, Stored
from specdec_core.measure.paired import UNKNOWN, paired_ratio
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.tokens.statistics import Ratio

OURS = "specdec"
FOLDS = 6  # parts of the requests, each timed with what is the best on the others
EVERYTHING = slice(None)

Requests = list[int] | slice  # some of the requests of a comparison, by their places
T = TypeVar("T")


def interleaved(contestants: Sequence[T], turn: int) -> list[T]:
    """The contestants in the order in which they run in a turn: a random one, always the same for a
    turn of a number. No contestant always runs after the same other one."""
    return random.Random(turn).sample(contestants, len(contestants))


class Timed(Protocol):
    """What has times to compare."""

    def paces(self, at: Any = None) -> np.ndarray:
        """Seconds a token, shape (repeats, requests), under a load where there are several; NaN for
        a request that failed."""


class Contender(Document):
    """A contestant: this engine under a configuration, or a mode of another library."""

    name: str
    group: str  # its library: OURS, "transformers", "vllm"
    autoregressive: bool = False
    lossless: bool = True
    with_ours: bool = False  # another library with settings or a plug-in of ours: not its own best
    version: str = ""
    settings: dict[str, Any] = Field(default={})
    configuration: Configuration | None = None  # of ours

    @property
    def ours(self) -> bool:
        return self.group == OURS

    @property
    def key(self) -> str:
        """Its part of the names of files."""
        return digest_name(f"{self.group} {self.name} {self.version}")

    def paces(self, at: Any = None) -> np.ndarray:
        """As of :class:`Timed`."""
        raise NotImplementedError

    def mean_seconds(self, at: Any = None, requests: Requests = EVERYTHING) -> float:
        """Mean seconds a token of some of the requests, each the median over the repeats, so that
        ratios are :func:`paired_ratio`'s; NaN where all failed."""
        seconds = self.paces(at)[:, requests]
        answered = seconds[:, ~np.isnan(seconds).any(axis=0)]
        return float(np.median(answered, axis=0).mean()) if answered.size else float("nan")


AnyContender = TypeVar("AnyContender", bound=Contender)


def over(
    candidate: Timed, baseline: Timed, at: Any = None, requests: Requests = EVERYTHING
) -> Ratio:
    """How many times as fast `candidate` is, in seconds a token, on some of the requests: those
    that both answered in every repeat that both had."""
    if candidate is baseline:
        return Ratio(1.0, 1.0, 1.0)
    return paired_ratio(*(each.paces(at)[:, requests] for each in (baseline, candidate)))


class Fold(NamedTuple):
    """Requests to choose on, and others to time the choice on."""

    choose: list[int]
    time: list[int]


def folds(requests: int) -> list[Fold]:
    """The requests in :data:`FOLDS` random parts, always the same ones; every sixth one would be of
    one set, where several are mixed. A single request is both."""
    shuffled = random.Random(0).sample(range(requests), requests)
    parts = [sorted(shuffled[part::FOLDS]) for part in range(FOLDS)]
    return [Fold(sorted({*shuffled} - {*part}) or part, part) for part in parts]


@dataclass(frozen=True)
class Crossed(Generic[AnyContender]):
    """What was chosen for each of the :func:`folds`, timed on it: the speed that a choice has on
    requests that it was not made on, by all requests."""

    chosen: list[AnyContender]

    def paces(self, at: Any = None) -> np.ndarray:
        every = [each.paces(at) for each in self.chosen]
        paces = every[0][: min(map(len, every))].copy()
        for fold, own in zip(folds(paces.shape[1]), every, strict=True):
            paces[:, fold.time] = own[: len(paces), fold.time]
        return paces


class Lead(Document):
    """The best of ours against the best of a group, `at` a temperature or a load. They are the best
    on all requests, the ratio is of what is :class:`Crossed`."""

    at: Any
    group: str
    ours: str
    theirs: str
    ratio: float
    low: float
    high: float
    requests: int


class Comparison(Stored, ABC, Generic[AnyContender]):
    """Everything that a comparison's report is written from."""

    name: str
    started: datetime
    command: str
    pair: PairSpec  # with the data types that were used
    prompts: PromptSet
    max_new_tokens: int
    repeats: int
    rows: list[AnyContender]
    notes: list[str] = Field(default=[])
    environment: dict[str, str] = Field(default={})

    @property
    def groups(self) -> list[str]:
        """The groups of the contestants, ours first."""
        return sorted({row.group for row in self.rows}, key=lambda group: (group != OURS, group))

    @property
    def others(self) -> list[str]:
        """The groups that are not ours."""
        return [group for group in self.groups if group != OURS]

    @abstractmethod
    def sizes(self) -> Iterable[tuple[Any, int]]:
        """The temperatures or loads, with the number of requests of each."""

    @abstractmethod
    def best(self, at: Any, group: str, requests: Requests = EVERYTHING) -> AnyContender | None:
        """The best lossless row of a group on some of the requests, without the rows
        :attr:`Contender.with_ours`; None where there is none."""

    def leads(self) -> list[Lead]:
        """At each temperature or load, the best of ours against the best of every other group."""
        found = ((at, count, group) for at, count in self.sizes() for group in self.others)
        return [lead for each in found if (lead := self._lead(*each)) is not None]

    def _lead(self, at: Any, count: int, group: str) -> Lead | None:
        ours, theirs = self.best(at, OURS), self.best(at, group)
        if ours is None or theirs is None:
            return None
        ratio = over(self._crossed(at, count, OURS), self._crossed(at, count, group), at)
        return Lead(
            at=at,
            group=group,
            ours=ours.name,
            theirs=theirs.name,
            ratio=ratio.value,
            low=ratio.low,
            high=ratio.high,
            requests=count,
        )

    def _crossed(self, at: Any, count: int, group: str) -> Crossed[AnyContender]:
        best = (self.best(at, group, fold.choose) for fold in folds(count))
        return Crossed([row for row in best if row is not None])

    def ratios(self, row: AnyContender, at: Any, baseline: AnyContender | None) -> dict[str, float]:
        """The ratios of a row to our autoregressive decoding, `baseline`, and to the best of every
        other group, as columns of a table."""
        against = {"autoregressive": baseline}
        against |= {group: self.best(at, group) for group in self.others}
        columns: dict[str, float] = {}
        for name, other in against.items():
            key, ratio = f"over_{name}", UNKNOWN if other is None else over(row, other, at)
            columns |= {key: ratio.value, f"{key}_low": ratio.low, f"{key}_high": ratio.high}
        return columns
