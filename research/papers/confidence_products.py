"""How often a draft is accepted as a whole, by its product of confidences (Post-use, Fig. 2c)."""

from __future__ import annotations

import numpy as np
import pandas as pd

from specdec_core.recordings.track import Track

MOST_STARTS = 40_000  # positions from which drafts are followed; of more, evenly spread ones
LONGEST = 10


def prefixes(track: Track, longest: int = LONGEST) -> pd.DataFrame:
    """Drafts of 1 … `longest` tokens from positions of the target's output: `length`, `product`
    (Π q(y)) and `accepted` (all of it). Only drafts that a round could make."""
    starts = np.arange(0, len(track.position), -(-len(track.position) // MOST_STARTS))
    longest = min(longest, track.windows.shape[1])
    probability = track.trace.probability[track.windows[starts, :longest]].astype(np.float64)
    lengths = np.arange(1, longest + 1)
    possible = lengths <= track.bound[starts, None]
    accepted = lengths <= track.agreeing[starts, None]
    return pd.DataFrame({
        "length": np.broadcast_to(lengths, possible.shape)[possible],
        "product": np.cumprod(probability, axis=1)[possible],
        "accepted": accepted[possible],
    })  # fmt: skip


def by_confidence(prefixes: pd.DataFrame, bins: int) -> pd.DataFrame:
    """Rows low, high, product (mean), acceptance, count of the bins that hold any prefix."""
    index = np.minimum((prefixes["product"].to_numpy() * bins).astype(int), bins - 1)
    groups = prefixes.groupby(index)
    table = groups.agg(
        product=("product", "mean"), acceptance=("accepted", "mean"), count=("accepted", "size")
    )
    table.insert(0, "low", table.index / bins)
    table.insert(1, "high", (table.index + 1) / bins)
    return table.reset_index(drop=True)
