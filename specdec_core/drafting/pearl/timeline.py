"""When the draft and the target did what, for a trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_MOST = 200_000  # spans kept, the latest


@dataclass(slots=True)
class TimelineSpan:
    """Work of one side, in seconds on the target's clock."""

    by: str  # "draft" or "target"
    what: str  # "draft", "verify", "wait"
    start: float
    end: float
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Timeline:
    """Spans in the order of their arrival."""

    def __init__(self) -> None:
        self.spans: deque[TimelineSpan] = deque(maxlen=_MOST)

    def add(self, by: str, what: str, start: float, end: float, **facts: Any) -> None:
        self.spans.append(TimelineSpan(by, what, start, end, facts))

    def chrome_trace(self) -> dict[str, Any]:
        """For chrome://tracing and Perfetto: a row each for the draft and the target."""
        first = min((span.start for span in self.spans), default=0.0)
        rows = {name: number for number, name in enumerate(sorted({s.by for s in self.spans}), 1)}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
            for name, tid in rows.items()
        ]
        return {"traceEvents": [*names, *(_event(s, first, rows[s.by]) for s in self.spans)]}


def _event(span: TimelineSpan, first: float, row: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.what,
        "pid": 1,
        "tid": row,
        "ts": 1e6 * (span.start - first),
        "dur": 1e6 * span.seconds,
        "args": span.facts,
    }


def busy(spans: Iterable[TimelineSpan], by: str, what: str) -> float:
    """Seconds that a side spent on one kind of work."""
    return sum(span.seconds for span in spans if (span.by, span.what) == (by, what))
