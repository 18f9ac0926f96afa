"""The result of a comparison of servers under load, and what follows from it.

A contestant's speed at n clients is n over the mean seconds a token of its requests: what n clients
that always wait are written together (Little's law). Everybody answers the same requests at the
same number of clients, so ratios of speeds are those of paired requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import Field

from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.config import Configuration, Document, PairSpec
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.studies.bench.result import LEAST_HALF, OURS
from specdec_core.studies.load.requests import LoadRecord
from specdec_core.tokens.statistics import Ratio, paired_ratio

UNKNOWN = Ratio(*[float("nan")] * 3)
FILE = "load.json"


class LoadRow(Document):
    """A contestant, and by number of clients its records [repeat][request]."""

    name: str
    group: str  # OURS or "vllm"
    autoregressive: bool = False
    lossless: bool = True
    version: str = ""
    settings: dict[str, Any] = Field(default={})
    configuration: Configuration | None = None  # of ours
    runs: dict[int, list[list[LoadRecord]]] = Field(default={})

    @property
    def ours(self) -> bool:
        return self.group == OURS

    def values(self, clients: int, of: Callable[[LoadRecord], float]) -> np.ndarray:
        """A number of each request, shape (repeats, requests)."""
        return np.array([[of(record) for record in run] for run in self.runs[clients]])

    def seconds_per_token(self, clients: int) -> np.ndarray:
        """Shape (repeats, requests); NaN for requests that failed."""
        return self.values(clients, lambda record: record.seconds_per_token)

    def tokens_per_second(self, clients: int, requests: slice = slice(None)) -> float:
        """What all clients together are written while all of them wait, from some of the requests;
        NaN where all failed."""
        seconds = self.seconds_per_token(clients)[:, requests]
        answered = seconds[:, ~np.isnan(seconds).any(axis=0)]
        if not answered.size:
            return float("nan")
        return float(clients / np.median(answered, axis=0).mean())

    def whole_run(self, clients: int) -> float:
        """Tokens of a run over its seconds, its end included, when some clients have no request
        left; the median over repeats."""
        speeds = []
        for run in self.runs[clients]:
            start, end = min(r.sent for r in run), max((r.last or r.sent) for r in run)
            speeds.append(sum(r.tokens for r in run if r.error is None) / max(end - start, 1e-9))
        return float(np.median(speeds))

    def errors(self, clients: int) -> int:
        """Requests that failed, over all repeats."""
        return sum(record.error is not None for run in self.runs[clients] for record in run)

    def equal_texts(self, clients: int, reference: LoadRow) -> tuple[int, int]:
        """How many of the answered requests, over all repeats, have the text of the first repeat of
        `reference`, and how many there are."""
        pairs = [
            (record.text, expected.text)
            for run in self.runs[clients]
            for record, expected in zip(run, reference.runs[clients][0], strict=True)
            if record.error is None and expected.error is None
        ]
        return sum(text == expected for text, expected in pairs), len(pairs)


class Lead(Document):
    """The best of ours against the best of a group at a number of clients. With `held_out`, both
    were chosen on every other request and compared on the rest; else chosen and compared on all,
    which favours both."""

    clients: int
    group: str
    ours: str
    theirs: str
    ratio: float
    low: float
    high: float
    requests: int
    held_out: bool


class LoadResult(Document):
    """Everything that the report is written from."""

    name: str
    started: datetime
    command: str
    pair: PairSpec  # with the data types that were used
    prompts: PromptSet
    max_new_tokens: int
    repeats: int
    clients: list[int]
    slots: int | None = None  # unset, as many as there are clients
    requests: dict[int, int]  # of a run, by the number of clients
    rows: list[LoadRow]
    notes: list[str] = Field(default=[])
    environment: dict[str, str] = Field(default={})

    @property
    def groups(self) -> list[str]:
        """Whose servers there are, ours first."""
        return sorted({row.group for row in self.rows}, key=lambda group: (group != OURS, group))

    def of(self, group: str) -> list[LoadRow]:
        return [row for row in self.rows if row.group == group]

    def autoregressive(self, group: str = OURS) -> LoadRow | None:
        return next((row for row in self.of(group) if row.autoregressive), None)

    def best(self, clients: int, group: str, requests: slice = slice(None)) -> LoadRow | None:
        """The fastest lossless row of a group at a number of clients, on some of the requests;
        rows with errors do not count."""
        return fastest(self.of(group), clients, requests)

    def leads(self) -> list[Lead]:
        """At each number of clients, the best of ours against the best of every other group."""
        found = (
            self._against(clients, group)
            for clients in self.clients
            for group in self.groups
            if group != OURS
        )
        return [lead for lead in found if lead is not None]

    def _against(self, clients: int, group: str) -> Lead | None:
        count = self.requests[clients]
        held_out = count >= 2 * LEAST_HALF
        everything = slice(None), slice(None)
        choose, report = (slice(0, None, 2), slice(1, None, 2)) if held_out else everything
        ours, theirs = (self.best(clients, side, choose) for side in (OURS, group))
        if ours is None or theirs is None:
            return None
        ratio = over(ours, theirs, clients, report)
        return Lead(
            clients=clients,
            group=group,
            ours=ours.name,
            theirs=theirs.name,
            ratio=ratio.value,
            low=ratio.low,
            high=ratio.high,
            requests=len(range(count)[report]),
            held_out=held_out,
        )

    def unequal(self) -> list[tuple[int, LoadRow]]:
        """Our lossless rows that in float32 wrote something else than autoregressive decoding, with
        the number of clients."""
        baseline = self.autoregressive()
        if self.pair.runner.target_dtype != "float32" or baseline is None:
            return []
        found = []
        for clients in self.clients:
            for row in self.of(OURS):
                equal, compared = row.equal_texts(clients, baseline)
                if row.lossless and equal < compared:
                    found.append((clients, row))
        return found

    def save(self, folder: Path) -> Path:
        return write_atomically(folder / FILE, self.model_dump_json())

    @classmethod
    def load(cls, folder: Path) -> LoadResult:
        """Read what `save` wrote; raises :class:`UserError` where there is nothing."""
        path = Path(folder) / FILE
        if not path.exists():
            raise UserError(f"{folder}: no comparison under load in it (no {FILE})")
        return cls.model_validate_json(path.read_text())


def over(
    candidate: LoadRow, baseline: LoadRow, clients: int, requests: slice = slice(None)
) -> Ratio:
    """How many times faster `candidate` is, in seconds a token of a request, on some of the
    requests: those that both answered every time."""
    if candidate is baseline:
        return Ratio(1.0, 1.0, 1.0)
    theirs, ours = (row.seconds_per_token(clients)[:, requests] for row in (baseline, candidate))
    answered = ~(np.isnan(theirs).any(axis=0) | np.isnan(ours).any(axis=0))
    if not answered.any():
        return UNKNOWN
    return paired_ratio(theirs[:, answered], ours[:, answered])


def fastest(rows: Iterable[LoadRow], clients: int, requests: slice = slice(None)) -> LoadRow | None:
    """The fastest lossless row that answered everything; None where there is none."""
    sound = [row for row in rows if row.lossless and not row.errors(clients)]
    return max(sound, key=lambda row: row.tokens_per_second(clients, requests), default=None)


def requests_frame(result: LoadResult) -> pd.DataFrame:
    """One row a request, repeat, number of clients and contestant, its times in seconds."""
    return pd.DataFrame(
        {
            "clients": clients,
            "contestant": row.name,
            "group": row.group,
            "repeat": repeat,
            "request": record.index,
            "sent": record.sent,
            "first": record.first,
            "last": record.last,
            "prompt_tokens": record.prompt_tokens,
            "tokens": record.tokens,
            "status": record.status,
            "error": record.error,
        }
        for row in result.rows
        for clients, runs in row.runs.items()
        for repeat, run in enumerate(runs)
        for record in run
    )


def summary_frame(result: LoadResult) -> pd.DataFrame:
    """One row a number of clients and contestant: tokens/s, seconds to the first token and for each
    further one (medians and 95th percentiles over all requests), errors, the ratios of speeds with
    their intervals to our autoregressive decoding and to the best of every other group, and texts
    equal to our autoregressive decoding's."""
    baseline, rows = result.autoregressive(), []
    for clients in result.clients:
        against = {"autoregressive": baseline}
        against |= {group: result.best(clients, group) for group in result.groups if group != OURS}
        for row in result.rows:
            summary: dict[str, Any] = {
                "clients": clients,
                "contestant": row.name,
                "group": row.group,
                "lossless": row.lossless,
                "requests": sum(map(len, row.runs[clients])),
                "errors": row.errors(clients),
                "tokens_per_second": row.tokens_per_second(clients),
                "whole_run": row.whole_run(clients),
                **_percentiles("ttft", row.values(clients, lambda record: record.ttft)),
                **_percentiles("tpot", row.values(clients, lambda record: record.tpot)),
            }
            for name, other in against.items():
                ratio = over(row, other, clients) if other is not None else UNKNOWN
                summary |= {
                    f"over_{name}": ratio.value,
                    f"over_{name}_low": ratio.low,
                    f"over_{name}_high": ratio.high,
                }
            equal = row.equal_texts(clients, baseline) if baseline is not None else (None, None)
            summary["equal"], summary["compared"] = equal
            rows.append(summary)
    return pd.DataFrame(rows)


def _percentiles(name: str, values: np.ndarray) -> dict[str, float]:
    known = values[~np.isnan(values)]
    median, p95 = np.percentile(known, [50, 95]) if known.size else (float("nan"),) * 2
    return {f"{name}_median": float(median), f"{name}_p95": float(p95)}
