"""The result of a comparison of servers under load, and what follows from it.

A contestant's speed with n clients is n over the mean seconds a token of its requests: what n
clients that always wait are written together (Little's law). At a rate it is the tokens of a run
over its seconds; while a server keeps up, that is what was asked of it, and what differs are the
latencies. Everybody answers the same requests under the same load, so ratios are those of paired
requests: of their seconds a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from pydantic import Field

from specdec_core.evidence.load.load import BenchLoad
from specdec_core.evidence.load.requests import LoadRecord
from specdec_core.measure.comparison import (
    OURS,
    UNKNOWN,
    Comparison,
    Contender,
    Lead,
    lead_over,
    ratio_columns,
)
from specdec_core.search.load.measures import LoadMeasures, measure
from specdec_core.search.load.workload import Slo
from specdec_core.tokens.statistics import Ratio, paired_difference, paired_ratio

EVERYTHING = slice(None)


class LoadRow(Contender):
    """A contestant, and by load its records [repeat][request]."""

    over_http: bool = True  # not: the engine of a server of ours, without it
    runs: dict[str, list[list[LoadRecord]]] = Field(default={})  # by the load's key

    def of(self, load: BenchLoad) -> list[list[LoadRecord]]:
        return self.runs[load.key]

    def values(self, load: BenchLoad, of: Callable[[LoadRecord], float]) -> np.ndarray:
        """A number of each request, shape (repeats, requests)."""
        return np.array([[of(record) for record in run] for run in self.of(load)])

    def seconds_per_token(self, load: BenchLoad) -> np.ndarray:
        """Shape (repeats, requests); NaN for requests that failed."""
        return self.values(load, lambda record: record.seconds_per_token)

    def mean_seconds(self, load: BenchLoad, requests: slice = EVERYTHING) -> float:
        """Seconds a token of some of the requests, on average; NaN where all failed."""
        seconds = self.seconds_per_token(load)[:, requests]
        answered = seconds[:, ~np.isnan(seconds).any(axis=0)]
        return float(np.median(answered, axis=0).mean()) if answered.size else float("nan")

    def tokens_per_second(self, load: BenchLoad) -> float:
        """What all clients together are written while all of them wait, or, at a rate, the tokens
        of whole runs over their seconds; NaN where all requests failed."""
        if load.clients is None:
            return self.median(load, lambda run: run.tokens_per_second)
        return load.clients / self.mean_seconds(load)

    def measures(self, load: BenchLoad, slo: Slo | None = None) -> list[LoadMeasures]:
        """The measures of each run."""
        return [measure(records_frame(run), slo) for run in self.of(load)]

    def median(
        self, load: BenchLoad, of: Callable[[LoadMeasures], float], slo: Slo | None = None
    ) -> float:
        """The median over repeats of a measure."""
        return float(np.median([of(run) for run in self.measures(load, slo)]))

    def good_share(self, load: BenchLoad, slo: Slo | None, requests: slice = EVERYTHING) -> float:
        """Of some of the requests, those within the objective, over all repeats."""
        runs = [measure(records_frame(run[requests]), slo) for run in self.of(load)]
        return sum(run.good_share for run in runs) / len(runs)

    def errors(self, load: BenchLoad) -> int:
        """Requests that failed, over all repeats."""
        return sum(record.error is not None for run in self.of(load) for record in run)

    def equal_texts(self, load: BenchLoad, reference: LoadRow) -> tuple[int, int]:
        """How many of the answered requests, over all repeats, have the text of the first repeat of
        `reference`, and how many there are."""
        pairs = [
            (record.text, expected.text)
            for run in self.of(load)
            for record, expected in zip(run, reference.of(load)[0], strict=True)
            if record.error is None and expected.error is None
        ]
        return sum(text == expected for text, expected in pairs), len(pairs)

    def arms(self, load: BenchLoad) -> Counter[str]:
        """Rounds by who drafted, over all requests; empty where nobody chooses."""
        counted: Counter[str] = Counter()
        for run in self.of(load):
            for record in run:
                counted.update(record.arms)
        return counted

    def candidates(self, load: BenchLoad) -> float:
        """Candidates of a request's round, on average; NaN where no server tells."""
        records = [record for run in self.of(load) for record in run]
        rounds = sum(record.rounds for record in records)
        return sum(record.drafted for record in records) / rounds if rounds else float("nan")


class LoadLead(Lead):
    """Our best against another group's under a load."""

    load: BenchLoad


class LoadResult(Comparison[LoadRow]):
    """A comparison of servers under load."""

    FILE: ClassVar[str] = "load.json"
    WHAT: ClassVar[str] = "comparison under load"

    clients: list[int]
    rates: list[float] = Field(default=[])
    slo: Slo | None = None
    slots: int | None = None  # unset, as many as there are clients, or the plan's at a rate
    requests: dict[str, int]  # of a run, by the load's key

    @property
    def loads(self) -> list[BenchLoad]:
        """Clients, then rates."""
        closed = [BenchLoad(clients=clients) for clients in self.clients]
        return [*closed, *(BenchLoad(rate=rate) for rate in self.rates)]

    def of(self, group: str) -> list[LoadRow]:
        return [row for row in self.rows if row.group == group]

    def autoregressive(self, group: str = OURS) -> LoadRow | None:
        served = (row for row in self.of(group) if row.over_http)
        return next((row for row in served if row.autoregressive), None)

    @property
    def with_and_without_http(self) -> list[tuple[LoadRow, LoadRow]]:
        """Our servers and their engines alone, of those whose engine was measured."""
        ours = [(row, row.configuration.id) for row in self.of(OURS) if row.configuration]
        alone = {config_id: row for row, config_id in ours if not row.over_http}
        return [(row, alone[i]) for row, i in ours if row.over_http and i in alone]

    def best(self, load: BenchLoad, group: str, requests: slice = EVERYTHING) -> LoadRow | None:
        """The best lossless row of a group under a load, on some of the requests: at a rate the one
        with the most of them within the objective, then, and with clients, the fastest. Rows with
        errors do not count, nor those :attr:`Contender.with_ours` or not over HTTP."""
        return best_of(self.of(group), load, self.slo, requests)

    def leads(self) -> list[LoadLead]:
        """Under each load, the best of ours against the best of every other group."""
        found = []
        for load in self.loads:
            for group in self.others:
                lead = self._against(load, group)
                if lead is not None:
                    found.append(LoadLead(load=load, **lead.model_dump()))
        return found

    def _against(self, load: BenchLoad, group: str) -> Lead | None:
        def best(whose: str, requests: slice) -> LoadRow | None:
            return self.best(load, whose, requests)

        def ratio(candidate: LoadRow, baseline: LoadRow, requests: slice) -> Ratio:
            return over(candidate, baseline, load, requests)

        return lead_over(group, self.requests[load.key], best, ratio)

    def unequal(self) -> list[tuple[BenchLoad, LoadRow]]:
        """Our lossless rows that in float32 wrote something else than autoregressive decoding, with
        the load."""
        baseline = self.autoregressive()
        if self.pair.runner.target_dtype != "float32" or baseline is None:
            return []
        found = []
        for load in self.loads:
            for row in self.of(OURS):
                equal, compared = row.equal_texts(load, baseline)
                if row.lossless and equal < compared:
                    found.append((load, row))
        return found

    def lateness(self) -> np.ndarray:
        """Seconds by which the requests of open loops were sent after their arrival times."""
        records = (
            r for row in self.rows for runs in row.runs.values() for run in runs for r in run
        )
        return np.array([r.sent - r.arrival for r in records if r.arrival is not None])


def over(
    candidate: LoadRow, baseline: LoadRow, load: BenchLoad, requests: slice = EVERYTHING
) -> Ratio:
    """How many times faster `candidate` is, in seconds a token of a request, on some of the
    requests: those that both answered every time."""
    if candidate is baseline:
        return Ratio(1.0, 1.0, 1.0)
    theirs, ours = (row.seconds_per_token(load)[:, requests] for row in (baseline, candidate))
    answered = ~(np.isnan(theirs).any(axis=0) | np.isnan(ours).any(axis=0))
    if not answered.any():
        return UNKNOWN
    return paired_ratio(theirs[:, answered], ours[:, answered])


def added_ttft(served: LoadRow, alone: LoadRow, load: BenchLoad) -> Ratio:
    """Seconds by which first tokens come later from a server than from its engine alone, on average
    over the requests that both answered every time."""
    theirs, ours = (row.values(load, lambda record: record.ttft) for row in (alone, served))
    answered = ~(np.isnan(theirs).any(axis=0) | np.isnan(ours).any(axis=0))
    if not answered.any():
        return UNKNOWN
    return paired_difference(theirs[:, answered], ours[:, answered])


def best_of(
    rows: Iterable[LoadRow], load: BenchLoad, slo: Slo | None = None, requests: slice = EVERYTHING
) -> LoadRow | None:
    """See :meth:`LoadResult.best`; None where no row is lossless and answered everything."""
    own = [row for row in rows if row.lossless and row.over_http and not row.with_ours]
    sound = [row for row in own if not row.errors(load)]

    def merit(row: LoadRow) -> tuple[float, float]:
        good = 0.0 if load.closed else row.good_share(load, slo, requests)
        return good, -row.mean_seconds(load, requests)

    return max(sound, key=merit, default=None)


def records_frame(records: Sequence[LoadRecord]) -> pd.DataFrame:
    """Records as :mod:`specdec_core.search.load.measures` takes them, with what else is known."""
    return pd.DataFrame(
        {
            "index": record.index,
            "arrival": record.arrival,
            "sent": record.begun,
            "first": record.first,
            "last": record.last,
            "prompt_tokens": record.prompt_tokens,
            "tokens": record.tokens,
            "rounds": record.rounds,
            "drafted": record.drafted,
            "status": record.status,
            "error": record.error,
        }
        for record in records
    )


def requests_frame(result: LoadResult) -> pd.DataFrame:
    """One row a request, repeat, load and contestant, its times in seconds; `sent` is the arrival
    time at a rate."""
    frames = []
    for row in result.rows:
        for load in result.loads:
            for repeat, run in enumerate(row.of(load)):
                about = {
                    "load": load.key, "clients": load.clients, "rate": load.rate,
                    "contestant": row.name, "group": row.group, "repeat": repeat,
                }  # fmt: skip
                frame = records_frame(run).rename(columns={"index": "request"})
                frames.append(pd.concat([pd.DataFrame([about] * len(run)), frame], axis=1))
    return pd.concat(frames, ignore_index=True)


def summary_frame(result: LoadResult) -> pd.DataFrame:
    """One row a load and contestant: tokens/s, seconds to the first token, for each further one and
    to the last (medians and 95th percentiles over all requests), requests a second that were
    answered and that met the objective, errors, the ratios of speeds with their intervals to our
    autoregressive decoding and to the best of every other group, texts equal to our autoregressive
    decoding's, and candidates of a round."""
    baseline, rows = result.autoregressive(), []
    for load in result.loads:
        against = {"autoregressive": baseline}
        against |= {group: result.best(load, group) for group in result.others}
        for row in result.rows:
            summary: dict[str, Any] = {
                "load": load.key,
                "clients": load.clients,
                "rate": load.rate,
                "contestant": row.name,
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
                **_percentiles("ttft", row.values(load, lambda record: record.ttft)),
                **_percentiles("tpot", row.values(load, lambda record: record.tpot)),
                **_percentiles("latency", row.values(load, lambda record: record.seconds)),
            }
            for name, other in against.items():
                ratio = over(row, other, load) if other is not None else UNKNOWN
                summary |= ratio_columns(f"over_{name}", ratio)
            equal = row.equal_texts(load, baseline) if baseline is not None else (None, None)
            summary["equal"], summary["compared"] = equal
            rows.append(summary)
    return pd.DataFrame(rows)


def http_frame(result: LoadResult) -> pd.DataFrame:
    """One row a load and server of ours whose engine was measured alone: tokens a second of both,
    the server's `share` of the engine's speed, and the seconds to the first token of both (means)
    and what HTTP `adds`, each with its interval."""
    rows: list[dict[str, Any]] = []
    for load in result.loads:
        for served, alone in result.with_and_without_http:
            rows.append(
                {
                    "load": load.key,
                    "clients": load.clients,
                    "rate": load.rate,
                    "contestant": served.name,
                    "tokens_per_second": served.tokens_per_second(load),
                    "tokens_per_second_alone": alone.tokens_per_second(load),
                    "ttft": float(np.nanmean(served.values(load, lambda record: record.ttft))),
                    "ttft_alone": float(np.nanmean(alone.values(load, lambda record: record.ttft))),
                    **ratio_columns("share", over(served, alone, load)),
                    **ratio_columns("adds", added_ttft(served, alone, load)),
                }
            )
    return pd.DataFrame(rows)


def arms_frame(result: LoadResult) -> pd.DataFrame:
    """One row a load, contestant whose drafters take turns, and drafter: its rounds and their
    share."""
    rows = []
    for row in result.rows:
        for load in result.loads:
            counted = row.arms(load)
            for arm, rounds in counted.items():
                about = {"load": load.key, "clients": load.clients, "rate": load.rate}
                rows.append(
                    about
                    | {"contestant": row.name, "arm": arm, "rounds": rounds}
                    | {"share": rounds / counted.total()}
                )
    return pd.DataFrame(rows)


def _percentiles(name: str, values: np.ndarray) -> dict[str, float]:
    known = values[~np.isnan(values)]
    median, p95 = np.percentile(known, [50, 95]) if known.size else (float("nan"),) * 2
    return {f"{name}_median": float(median), f"{name}_p95": float(p95)}
