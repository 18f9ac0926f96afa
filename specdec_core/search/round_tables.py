"""Tables of rounds that trials hand to the sweep."""

from __future__ import annotations

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
