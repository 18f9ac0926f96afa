"""Tables of rounds that trials hand to the sweep."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd


@dataclass(frozen=True)
class RoundTable:
    """A table of rounds as a Parquet file, made in the trial's process. Ray Tune prints results
    into messages that are not shown, and printing a table takes longer than starting a trial."""

    parquet: bytes = field(repr=False)

    @classmethod
    def of(cls, frame: pd.DataFrame) -> RoundTable:
        return cls(frame.to_parquet(index=False))

    @classmethod
    def joined(cls, parts: Sequence[RoundTable]) -> RoundTable | None:
        """All parts as one table; None without parts."""
        if len(parts) < 2:
            return parts[0] if parts else None
        frames = [pd.read_parquet(io.BytesIO(part.parquet)) for part in parts]
        return cls.of(pd.concat(frames, ignore_index=True))
