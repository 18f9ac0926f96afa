"""Post-use & Pre-cut's figures and tables that recordings and decoded texts hold: Figs. 2a and 2b,
Table 9."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from specdec_core.base.errors import UserError
from specdec_core.engine import Request
from specdec_core.models.pair import load_pair
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording
from specdec_core.studies.component_times import component_times
from specdec_core.studies.draft_reuse import best_lengths, recycled
from specdec_core.studies.papers.studies import Decoded

MOST = 6  # prompts that are decoded to time components


def rounds(greedy: Mapping[str, Recording], decoded: Decoded) -> pd.DataFrame:
    """λ*_local round by round (Fig. 2a): columns prompts, draft, fixed (λ*_global at the forwards'
    times of the decoded texts), request, round, length. Drafts with which no chain was decoded are
    left out. Raises :class:`UserError` where none is left."""
    parts, costs = [], target_costs(decoded)
    if not costs:
        raise UserError("no chain of a draft model was decoded, which tells what forwards cost")
    for name, recording in greedy.items():
        replay = Replay(recording, hidden=False)
        for draft, cost in costs.items():
            if draft in recording.header.pair.drafts:
                found = best_lengths(replay, cost, draft)
                columns = {"prompts": name, "draft": draft, "fixed": found.fixed}
                parts.append(found.rounds.assign(**columns))
    return pd.concat(parts, ignore_index=True)


def target_costs(decoded: Decoded) -> dict[str, float]:
    """What a target forward takes in draft forwards, by draft, over all rounds with chains."""
    seconds: dict[str, list[float]] = {}
    for measured in decoded.result.measured:
        drafter, draft = measured.configuration.drafter, measured.configuration.draft
        if drafter is None or draft is None or drafter.kind != "draft_model":
            continue
        for generation in decoded.of(measured.prompts, measured.configuration):
            sums = seconds.setdefault(draft, [0.0, 0.0, 0.0, 0.0])
            for each in generation.rounds[1:]:
                sums[0] += each.target_forward_seconds
                sums[1] += 1
                sums[2] += each.draft_forward_seconds
                sums[3] += each.draft_forwards
    return {
        draft: (target / rounds) / (drafting / forwards)
        for draft, (target, rounds, drafting, forwards) in seconds.items()
        if rounds and forwards and drafting
    }


def phrases(greedy: Mapping[str, Recording]) -> pd.DataFrame:
    """Phrases of earlier rounds that come again (Fig. 2b): columns prompts, draft, call, tokens,
    of, calls, share. Raises :class:`UserError` for a pair without a draft model."""
    parts = []
    for name, recording in greedy.items():
        replay = Replay(recording, hidden=False)
        for draft in recording.header.pair.drafts:
            if draft not in recording.header.eagle_heads:
                found = recycled(replay, draft)
                parts.append(found.assign(prompts=name, draft=draft))
    if not parts:
        raise UserError("the pair has no draft model")
    return pd.concat(parts, ignore_index=True)


def components(greedy: Mapping[str, Recording]) -> pd.DataFrame:
    """Latency by component (Table 9), measured now on the first prompts recorded: columns
    component, calls, seconds, each, a_round, share, and in every row the tokens of the output, the
    drafted ones, those of them that were recycled, and the suffixes. Raises :class:`UserError` for
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
