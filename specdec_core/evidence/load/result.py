"""The result of a comparison of servers under load, and its tables.

A contestant's speed with n clients is n over the mean seconds a token of its requests: the tokens a
second that n clients receive together while all of them wait (Little's law). At a rate it is the
tokens of a run over its seconds; while a server keeps up, that is the rate of the requests, and
servers differ in their latencies. All contestants answer the same requests under the same load, so
ratios are of the seconds a token of paired requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from pydantic import Field

from specdec_core.measure.comparison import EVERYTHING, OURS, Comparison, Contender, Requests
from specdec_core.search.load.measures import LoadMeasures, by_request, measure
from specdec_core.search.load.records import LoadRun, records_frame
from specdec_core.search.load.workload import Load, Slo

DISTURBANCE = 1.3  # other programs slow a whole run down by less than this


class LoadRow(Contender):
    """A contestant, and by load its records [repeat][request]."""

    runs: dict[str, list[LoadRun]] = Field(default={})  # by the load's key

    def of(self, load: Load) -> list[LoadRun]:
        return self.runs[load.key]

    def values(self, load: Load, measure: str) -> np.ndarray:
        """A measure of each request (:func:`~specdec_core.search.load.measures.measured`), shape
        (repeats, requests); NaN where it failed."""
        return by_request(self.of(load), measure)

    def paces(self, at: Any = None) -> np.ndarray:
        return np.array([[record.pace for record in run] for run in self.of(at)])

    def tokens_per_second(self, load: Load, requests: Requests = EVERYTHING) -> float:
        """Tokens of all clients together while all of them wait, by some of the requests, or, at a
        rate, of whole runs over their seconds; NaN where all requests failed."""
        if load.clients is None:
            return self.median(load, lambda run: run.tokens_per_second)
        return load.clients / self.mean_seconds(load, requests)

    def median(
        self, load: Load, of: Callable[[LoadMeasures], float], slo: Slo | None = None
    ) -> float:
        """The median over repeats of a measure."""
        runs = (measure(records_frame(run), slo) for run in self.of(load))
        return float(np.median([of(run) for run in runs]))

    def good_share(self, load: Load, slo: Slo | None, requests: Requests = EVERYTHING) -> float:
        """The share of some of the requests that is within the objective, over all repeats."""
        runs = [measure(records_frame(run).iloc[requests], slo) for run in self.of(load)]
        return sum(run.good_share for run in runs) / len(runs)

    def errors(self, load: Load) -> int:
        """Requests that failed, over all repeats."""
        return sum(record.error is not None for run in self.of(load) for record in run)

    def equal_texts(self, load: Load, reference: LoadRow) -> tuple[int, int]:
        """The number of answered requests, over all repeats, with the text of the first repeat of
        `reference`, and the number of all."""
        pairs = [
            (record.text, expected.text)
            for run in self.of(load)
            for record, expected in zip(run, reference.of(load)[0], strict=True)
            if record.error is None and expected.error is None
        ]
        return sum(text == expected for text, expected in pairs), len(pairs)

    def candidates(self, load: Load) -> float:
        """Mean candidates of a request's round; NaN where the server does not report them."""
        records = [record for run in self.of(load) for record in run]
        rounds = sum(record.rounds for record in records)
        return sum(record.drafted for record in records) / rounds if rounds else float("nan")


class LoadResult(Comparison[LoadRow]):
    """A comparison of servers under load."""

    FILE: ClassVar[str] = "load.json"
    WHAT: ClassVar[str] = "comparison under load"

    loads: list[Load]  # clients, then rates
    slo: Slo | None = None
    slots: int | None = None  # unset, as many as there are clients, or the plan's at a rate
    one_server: bool = False  # a started server answered all loads

    def of(self, group: str) -> list[LoadRow]:
        return [row for row in self.rows if row.group == group]

    def autoregressive(self, group: str = OURS) -> LoadRow | None:
        return next((row for row in self.of(group) if row.autoregressive), None)

    def sizes(self) -> list[tuple[Load, int]]:
        return [(load, load.requests) for load in self.loads]

    def best(self, at: Load, group: str, requests: Requests = EVERYTHING) -> LoadRow | None:
        """At a rate the row with the most requests within the objective, then, and with clients,
        the fastest. Rows with errors do not count."""
        own = [row for row in self.of(group) if row.lossless and not row.with_ours]

        def merit(row: LoadRow) -> tuple[float, float]:
            good = 0.0 if at.closed else row.good_share(at, self.slo, requests)
            return good, -row.mean_seconds(at, requests)

        return max((row for row in own if not row.errors(at)), key=merit, default=None)

    def unequal(self) -> list[tuple[Load, LoadRow]]:
        """Our lossless rows with texts in float32 unequal to autoregressive decoding's, with the
        load. In other data types texts may differ by rounding alone."""
        baseline = self.autoregressive()
        if self.pair.runner.target_dtype != "float32" or baseline is None:
            return []
        found = []
        for load in self.loads:
            for row in self.of(baseline.group):
                equal, compared = row.equal_texts(load, baseline)
                if row.lossless and equal < compared:
                    found.append((load, row))
        return found

    def lateness(self) -> np.ndarray:
        """Seconds by which the requests of open loops were sent after their arrival times."""
        runs = [run for row in self.rows for runs in row.runs.values() for run in runs]
        records = (record for run in runs for record in run)
        return np.array([r.sent - r.arrival for r in records if r.arrival is not None])


def requests_frame(result: LoadResult) -> pd.DataFrame:
    """One row a request, repeat, load and contestant, its times in seconds."""
    frames = [
        pd.DataFrame([{**_place(load, row), "group": row.group, "repeat": repeat}] * len(run)).join(
            records_frame(run).rename(columns={"index": "request"})
        )
        for row in result.rows
        for load in result.loads
        for repeat, run in enumerate(row.of(load))
    ]
    return pd.concat(frames, ignore_index=True)


def summary_frame(result: LoadResult) -> pd.DataFrame:
    """One row a load and contestant: tokens/s, seconds to the first token, for each further one and
    to the last (medians and 95th percentiles over all requests), requests a second that were
    answered and that met the objective, errors, the ratios of speeds with their intervals to our
    autoregressive decoding and to the best of every other group, texts equal to our autoregressive
    decoding's, and candidates of a round."""
    baseline, rows = result.autoregressive(), []
    for load in result.loads:
        for row in result.rows:
            equal = row.equal_texts(load, baseline) if baseline is not None else (None, None)
            summary: dict[str, Any] = {
                **_place(load, row),
                "group": row.group,
                "lossless": row.lossless,
                "requests": sum(map(len, row.of(load))),
                "errors": row.errors(load),
                "tokens_per_second": row.tokens_per_second(load),
                "whole_run": row.median(load, lambda run: run.tokens_per_second),
                "requests_per_second": row.median(load, lambda run: run.requests_per_second),
                "goodput": row.median(load, lambda run: run.goodput, result.slo),
                "good_share": row.good_share(load, result.slo),
                "candidates": row.candidates(load),
                **_percentiles("ttft", row.values(load, "ttft")),
                **_percentiles("tpot", row.values(load, "tpot")),
                **_percentiles("latency", row.values(load, "latency")),
                **result.ratios(row, load, baseline),
                "equal": equal[0],
                "compared": equal[1],
            }
            rows.append(summary)
    return pd.DataFrame(rows)


def _place(load: Load, row: LoadRow) -> dict[str, Any]:
    place = {"load": load.key, "clients": load.clients, "rate": load.rate}
    return {**place, "contestant": row.name}


def _percentiles(name: str, values: np.ndarray) -> dict[str, float]:
    known = values[~np.isnan(values)]
    median, p95 = np.percentile(known, [50, 95]) if known.size else (float("nan"),) * 2
    return {f"{name}_median": float(median), f"{name}_p95": float(p95)}
