"""Recordings of rejection sampling, made into a possible course of decoding.

A recording holds the target's sequence X_t ~ p and, drawn independently, the draft's Y_t ~ q.
Rejection sampling draws them together: token x is drafted and accepted with probability min(p(x),
q(x)). Given the sequence X_t, the candidate was therefore X_t with probability min(1,
q(X_t)/p(X_t)), and otherwise one that is rejected. A round visits each position at most once, so
one draw for each position decides what is accepted in any round.

Two things are approximate. Tokens outside the recorded top_k have an unknown q and share one
acceptance probability: the one at which the mean is that of Σ min(p, q). And a rejected candidate
is the recorded Y_t ≠ X_t, a draw of q and not of its excess over p; that changes how much is
drafted after a rejection, not what is accepted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from specdec_core.recordings.schema import Trace


def verified(trace: Trace, seed: int = 0) -> Trace:
    """`trace` with the draft's token replaced by the target's wherever one is accepted."""
    rows, most = trace.drafted, trace.header.top_k
    p, rank = trace.target_probability[rows], trace.rank[rows]
    known = rank < most
    q = trace.top_probs[rows, np.minimum(rank, most - 1)]
    # A token of the target's may be so unlikely that its probability was recorded as 0.
    accepted = np.minimum(1, np.divide(q, p, out=np.ones_like(q), where=p > 0))
    rest = (trace.overlap[rows].sum() - accepted[known].sum()) / max((~known).sum(), 1)
    accepted = np.where(known, accepted, np.clip(rest, 0, 1))
    q = np.where(known, q, accepted * p)
    # Y_t is X_t with probability q(X_t) as recorded; other Y_t make up the difference.
    draws = np.random.default_rng(seed).random(len(rows)) * (1 - q)
    differs = trace.draft_token[rows] != trace.target_token[rows]
    changed = differs & (draws < accepted - q)
    changed_rows = rows[changed]
    changes = {
        "draft_token": trace.target_token[changed_rows],
        "probability": q[changed],
        "draft_token_target_probability": p[changed],
    }
    columns = dict(trace.columns)
    for name, values in changes.items():
        columns[name] = columns[name].copy()
        columns[name][changed_rows] = values
    return replace(trace, columns=columns)
