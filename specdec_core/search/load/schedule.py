"""A schedule: a configuration for each range of load.

```yaml
ranges:
- up_to: 4          # requests decoded together
  configuration: {drafter: {kind: draft_model, policy: {kind: fixed, max_tokens: 6}}}
- configuration: {}  # with more: the target alone
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import pandas as pd
import yaml
from pydantic import Field, PositiveInt, field_validator, model_validator

from specdec_core.base.files import write_atomically
from specdec_core.base.observer import Observer
from specdec_core.config import (
    AUTOREGRESSIVE,
    Configuration,
    Value,
    distinct_labels,
    load_yaml,
    parse,
)
from specdec_core.cost.steps import StepTimes
from specdec_core.engine.scheduler import Limits
from specdec_core.recordings.replay import Replay
from specdec_core.search.load.answers import replayed_answers
from specdec_core.search.load.simulator import asks_of, simulate_clients
from specdec_core.search.load.workload import Slo, Workload

CLIENTS = (1, 2, 4, 8, 16)
TOLERANCE = 0.01  # a change of configuration has to gain more than this share


class Range(Value):
    """A configuration for up to so many requests; without `up_to`, for any number."""

    up_to: PositiveInt | None = None
    configuration: Configuration


class Schedule(Value):
    """Configurations by the number of requests that are decoded together, the fewest first."""

    ranges: tuple[Range, ...] = Field(min_length=1)

    @field_validator("ranges")
    @classmethod
    def _in_order(cls, ranges: tuple[Range, ...]) -> tuple[Range, ...]:
        *bounded, last = ranges
        limits = [each.up_to for each in bounded]
        if last.up_to is not None:
            raise ValueError("the last range ends nowhere: leave out its up_to")
        if None in limits:
            raise ValueError("only the last range has no up_to")
        if limits != sorted({limit for limit in limits if limit is not None}):
            raise ValueError(f"up_to must increase from range to range (it is {limits})")
        return ranges

    @model_validator(mode="after")
    def _sample_alike(self) -> Self:
        if len({each.configuration.sampling for each in self.ranges}) > 1:
            raise ValueError("the ranges' configurations sample differently; all must sample alike")
        return self

    def at(self, requests: int) -> Configuration:
        """The configuration for so many requests."""
        return next(
            each.configuration
            for each in self.ranges
            if each.up_to is None or requests <= each.up_to
        )

    @classmethod
    def of(cls, best: Mapping[int, Configuration]) -> Schedule:
        """`best[n]` for up to n requests, and the last one for more. Neighbours with one
        configuration are one range."""
        ranges: list[Range] = []
        for requests, configuration in sorted(best.items()):
            if ranges and ranges[-1].configuration == configuration:
                ranges.pop()
            ranges.append(Range(up_to=requests, configuration=configuration))
        *bounded, last = ranges
        return cls(ranges=(*bounded, Range(configuration=last.configuration)))

    @property
    def sentence(self) -> str:
        """The labels of its ranges."""
        labels = distinct_labels(each.configuration for each in self.ranges)
        parts, least = [], 1
        for each in self.ranges:
            label = labels[each.configuration.id]
            if each.up_to is None:
                parts.append(label if least == 1 else f"{label} from {least} requests on")
            else:
                parts.append(f"{label} up to {each.up_to}")
                least = each.up_to + 1
        return ", ".join(parts)

    def save(self, path: Path) -> Path:
        content = self.model_dump(mode="json", exclude_none=True)
        return write_atomically(path, yaml.safe_dump(content, sort_keys=False))


def load_schedule(path: str | Path) -> Schedule:
    """Read a schedule. Raises :class:`UserError` that names the file and the key."""
    return parse(Schedule, load_yaml(path), str(path))


def simulate_each(
    replay: Replay,
    configurations: Sequence[Configuration],
    times: StepTimes,
    clients: Sequence[int] = CLIENTS,
    limits: Limits | None = None,
    slo: Slo | None = None,
    observer: Observer | None = None,
) -> pd.DataFrame:
    """Every configuration, and autoregressive decoding, under every number of clients. One row
    each: `clients`, `config_id`, `tokens_per_second`, `goodput` (requests a second within `slo`)
    and medians of `ttft` and `tpot`. Raises :class:`UserError` for one that cannot be replayed."""
    limits = limits or Limits(max(clients))
    baseline = AUTOREGRESSIVE.model_copy(update={"sampling": replay.header.sampling})
    distinct = {each.id: each for each in (baseline, *configurations)}
    observer = observer or Observer()
    observer.stage("simulating", len(distinct))
    rows = []
    for config_id, configuration in distinct.items():
        answers = replayed_answers(replay, configuration)
        for count in clients:
            asks = asks_of(answers, Workload(clients=(count,)).size(count))
            measures = simulate_clients(answers, times, asks, count, limits).measure(slo)
            rows.append(
                {
                    "clients": count,
                    "config_id": config_id,
                    "tokens_per_second": measures.tokens_per_second,
                    "goodput": measures.goodput,
                    "ttft": measures.value("ttft", 50),
                    "tpot": measures.value("tpot", 50) if measures.tpot else float("nan"),
                }
            )
        observer.step()
    return pd.DataFrame(rows)


def choose_schedule(
    simulated: pd.DataFrame,
    configurations: Sequence[Configuration],
    by: str = "tokens_per_second",
    tolerance: float = TOLERANCE,
) -> Schedule:
    """The best configuration for each number of clients in what :func:`simulate_each` returns. The
    one for fewer clients is kept where no other gains more than `tolerance`."""
    known = {each.id: each for each in configurations}
    best: dict[int, Configuration] = {}
    kept: str | None = None
    for clients, rows in simulated.groupby("clients"):
        value = rows.set_index("config_id")[by]
        leader = str(value.idxmax())
        if kept is None or value[leader] > (1 + tolerance) * value[kept]:
            kept = leader
        best[int(str(clients))] = known[kept]
    return Schedule.of(best)
