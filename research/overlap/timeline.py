"""Spans of the draft and the target: their sums, and a trace for a browser."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from specdec_core.drafting.pearl.timeline import TimelineSpan


def chrome_trace(spans: Sequence[TimelineSpan]) -> dict[str, Any]:
    """For chrome://tracing and Perfetto: a row each for the draft and the target."""
    first = min((span.start for span in spans), default=0.0)
    rows = {name: number for number, name in enumerate(sorted({s.by for s in spans}), 1)}
    names = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
        for name, tid in rows.items()
    ]
    events = [
        {
            "ph": "X",
            "name": span.what,
            "pid": 1,
            "tid": rows[span.by],
            "ts": 1e6 * (span.start - first),
            "dur": 1e6 * span.seconds,
            "args": span.facts,
        }
        for span in spans
    ]
    return {"traceEvents": [*names, *events]}


def busy(spans: Iterable[TimelineSpan], by: str, what: str) -> float:
    """Seconds that a side spent on one kind of work."""
    return sum(span.seconds for span in spans if (span.by, span.what) == (by, what))
