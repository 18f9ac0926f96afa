"""Post-use & Pre-cut's Figs. 2a to 2c, which recordings hold, and its Table 9, timed on their
prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pandas as pd

from research.papers.component_times import component_times
from research.papers.confidence_products import by_confidence, prefixes
from research.papers.draft_reuse import best_lengths, recycled
from specdec_core.base.errors import UserError
from specdec_core.cost import Profile
from specdec_core.engine import Request
from specdec_core.models.pair import load_pair
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording

RANGES = 10  # of a product of confidences
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
    found = component_times(load_pair(header.pair), requests)
    return found.table.assign(
        tokens=found.counts.n,
        drafted=found.drafted,
        recycled=found.recycled,
        suffixes=found.suffixes,
    )
