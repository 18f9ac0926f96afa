"""What a load client sends, and the record of each answer, of a server or of this engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from specdec_core.config import Document


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A prompt, as text or as token ids, to be continued greedily by exactly `max_new_tokens`
    tokens. `arrival` is when it is sent in an open loop, in seconds after the run's start."""

    prompt: str | tuple[int, ...]
    max_new_tokens: int
    arrival: float | None = None


class LoadRecord(Document):
    """One request and its answer. Times are the client's, in seconds after the run's start."""

    index: int  # in the workload
    sent: float
    arrival: float | None = None  # when it should have been sent, in an open loop
    first: float | None = None  # the first text arrived
    last: float | None = None  # the last text, or the end of it, arrived
    prompt_tokens: int = 0  # both as the server counts them
    tokens: int = 0
    text: str = ""
    status: int | None = None  # of HTTP; None where there was no answer
    error: str | None = None  # why the answer is no complete one
    # As our server reports them: forwards of the target, and candidates.
    rounds: int = 0
    drafted: int = 0

    @property
    def begun(self) -> float:
        """When its times begin: its arrival in an open loop, however late the client sent it, for
        a delay of the client delays the answer; else when it was sent."""
        return self.sent if self.arrival is None else self.arrival

    @property
    def pace(self) -> float:
        """Seconds a token; NaN where it failed."""
        if self.error is not None or self.last is None:
            return math.nan
        return (self.last - self.begun) / max(self.tokens, 1)


LoadRun = list[LoadRecord]  # a contestant answers the requests of a load, once


def records_frame(records: Sequence[LoadRecord]) -> pd.DataFrame:
    """Records as :mod:`specdec_core.search.load.measures` takes them, with what else is known;
    `sent` is the arrival time at a rate."""
    known = ("index", "arrival", "first", "last", "prompt_tokens", "tokens", "rounds", "drafted")
    return pd.DataFrame(
        {"sent": record.begun}
        | {name: getattr(record, name) for name in (*known, "status", "error")}
        for record in records
    )
