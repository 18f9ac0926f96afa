"""What requests experience under load, from records of live or simulated ones alike.

Records are a table of one row a request: `index`; `sent`, `first` and `last`, the seconds at which
the request was sent and its first and last tokens came, on one clock; `prompt_tokens`; `tokens` of
the answer; and `error`, None where there was none. Of an error the times may be missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from specdec_core.config import Document
from specdec_core.search.load.records import LoadRun, records_frame
from specdec_core.search.load.workload import Slo

COLUMNS = ("index", "sent", "first", "last", "prompt_tokens", "tokens", "error")
PERCENTILES = (50, 90, 95, 99)


def measured(records: pd.DataFrame, slo: Slo | None = None) -> pd.DataFrame:
    """`records` with the measures of each request, missing where it failed: `ttft`, seconds to the
    first token; `tpot`, seconds for each token after the first, missing for a single token;
    `latency`, seconds to the last token; `tokens_per_second`; and `good`, whether it succeeded
    within `slo`."""
    failed = records["error"].notna()
    sent, first, last = (records[name].astype(float) for name in ("sent", "first", "last"))
    tokens = records["tokens"].astype(float)
    latency = last - sent
    table = records.assign(
        ttft=first - sent,
        tpot=((last - first) / (tokens - 1)).where(tokens > 1),
        latency=latency,
        tokens_per_second=tokens / latency.where(latency > 0),
    )
    table.loc[failed, ["ttft", "tpot", "latency", "tokens_per_second"]] = np.nan
    good = ~failed
    for name, limit in (slo.limits if slo else {}).items():
        good &= ~(table[name] > limit)  # a missing TPOT breaks no limit
    return table.assign(good=good)


def by_request(runs: Sequence[LoadRun], measure: str, slo: Slo | None = None) -> np.ndarray:
    """A measure of each request, shape (runs, requests), as of :func:`measured`."""
    return np.array([measured(records_frame(run), slo)[measure] for run in runs], float)


class LoadMeasures(Document):
    """The measures of many requests together. Percentiles, by number, are of the requests that
    succeeded, in seconds."""

    requests: int
    failed: int
    seconds: float  # from the first request sent to the last token
    requests_per_second: float  # that succeeded
    tokens_per_second: float  # of all answers together
    request_speed: float  # tokens for each second that a request took, from being sent to its end
    good_share: float  # of all requests, those within the objective; without one, that succeeded
    goodput: float  # such requests a second
    ttft: dict[int, float]
    tpot: dict[int, float]
    latency: dict[int, float]

    def value(self, measure: str, percentile: int) -> float:
        """A percentile of `ttft`, `tpot` or `latency`; NaN where it is unknown."""
        return float(getattr(self, measure).get(percentile, np.nan))


def measure(records: pd.DataFrame, slo: Slo | None = None) -> LoadMeasures:
    """The measures of `records`. Raises ValueError without any."""
    if records.empty:
        raise ValueError("no requests to measure")
    table = measured(records, slo)
    ends = table[["sent", "first", "last"]].astype(float)
    seconds = float(np.nanmax(ends.to_numpy()) - ends["sent"].min())
    succeeded = table["error"].isna()
    good, rate = int(table["good"].sum()), 1 / seconds if seconds > 0 else 0.0
    tokens = table.loc[succeeded, "tokens"].sum()
    return LoadMeasures(
        requests=len(table),
        failed=int((~succeeded).sum()),
        seconds=seconds,
        requests_per_second=float(succeeded.sum() * rate),
        tokens_per_second=float(tokens * rate),
        request_speed=float(tokens / table["latency"].sum()) if tokens else 0.0,
        good_share=good / len(table),
        goodput=good * rate,
        **{name: _percentiles(table[name]) for name in ("ttft", "tpot", "latency")},
    )


def _percentiles(values: pd.Series) -> dict[int, float]:
    """Nothing of no values."""
    present = values.dropna().to_numpy(dtype=float)
    if not len(present):
        return {}
    points = np.percentile(present, PERCENTILES)
    return dict(zip(PERCENTILES, map(float, points), strict=True))
