"""Rounds on their way from a trial's process to the sweep's folder."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd


@dataclass(frozen=True)
class Rounds:
    """A table of rounds as a Parquet file, made where the rounds were. Tune prints results into
    messages that nobody sees; a table takes longer to print than a trial to start."""

    parquet: bytes = field(repr=False)

    @classmethod
    def of(cls, frame: pd.DataFrame) -> Rounds:
        return cls(frame.to_parquet(index=False))

    @classmethod
    def joined(cls, parts: Sequence[Rounds]) -> Rounds | None:
        """One table of several; None of none."""
        if len(parts) < 2:
            return parts[0] if parts else None
        frames = [pd.read_parquet(io.BytesIO(part.parquet)) for part in parts]
        return cls.of(pd.concat(frames, ignore_index=True))
