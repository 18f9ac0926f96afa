"""Post-use & Pre-cut's Figs. 2a to 2c, which recordings hold, and its Table 9, timed on their
prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from research.papers.component_times import component_times
from research.papers.draft_reuse import best_lengths, recycled
from specdec_core.base.errors import UserError
from specdec_core.cost import Profile
from specdec_core.engine import Request
from specdec_core.models.pair import load_pair
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording
from specdec_core.recordings.track import Track

RANGES = 10  # of a product of confidences
MOST_STARTS = 40_000  # positions from which drafts are followed; of more, evenly spread ones
LONGEST = 10  # tokens of a draft that is followed
MOST = 6  # prompts that are decoded to time components


def rounds(greedy: Mapping[str, Recording], times: Profile) -> pd.DataFrame:
    """λ*_local round by round (Fig. 2a): columns prompts, draft, fixed (λ*_global at these forward
    times), request, round, length. Raises :class:`UserError` for a pair without a draft model."""

    def lengths(replay: Replay, draft: str) -> pd.DataFrame:
        cost = times.target_cost(draft, replay.recording.prompts.context)
        found = best_lengths(replay, cost, draft)
        return found.rounds.assign(fixed=found.fixed)

    return _by_draft(greedy, lengths)


def draft_models(recording: Recording) -> list[str]:
    """The draft models that are no heads. Raises :class:`UserError` where there are none."""
    header = recording.header
    if found := [draft for draft in header.pair.drafts if draft not in header.eagle_heads]:
        return found
    raise UserError("the pair has no draft model")


def phrases(greedy: Mapping[str, Recording]) -> pd.DataFrame:
    """Phrases of earlier rounds that come again (Fig. 2b): columns prompts, draft, call, tokens,
    of, calls, share. Raises :class:`UserError` for a pair without a draft model."""
    return _by_draft(greedy, recycled)


def confidences(greedy: Mapping[str, Recording]) -> pd.DataFrame:
    """Fig. 2c: columns prompts, draft, and the columns of :func:`by_confidence`. Raises
    :class:`UserError` for a pair without a draft model."""
    return _by_draft(
        greedy, lambda replay, draft: by_confidence(prefixes(replay.track(draft)), RANGES)
    )


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


def _by_draft(
    greedy: Mapping[str, Recording], table: Callable[[Replay, str], pd.DataFrame]
) -> pd.DataFrame:
    """The tables of each set and draft model, one below the other."""
    parts = []
    for name, recording in greedy.items():
        replay = Replay(recording, hidden=False)
        for draft in draft_models(recording):
            parts.append(table(replay, draft).assign(prompts=name, draft=draft))
    return pd.concat(parts, ignore_index=True)


def components(greedy: Mapping[str, Recording]) -> pd.DataFrame:
    """Latency by component (Table 9), measured now on the first prompts recorded: columns
    component, calls, seconds, each, a_round, share, and in every row the tokens of the output, the
    drafted ones, the recycled ones among them, and the suffixes. Raises :class:`UserError` for
    a pair without a draft model."""
    recording = next(iter(greedy.values()))
    recording.draft_name()  # which raises
    header, prompts = recording.header, recording.prompts
    requests = [
        Request(name, tuple(tokens.tolist()), header.max_new_tokens)
        for name, tokens in zip(prompts.ids[:MOST], prompts.tokens, strict=False)
    ]
    table, counts = component_times(load_pair(header.pair), requests)
    return table.assign(tokens=counts.n)
