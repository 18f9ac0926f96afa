"""Recordings of rejection sampling, as decoding them could have gone.

Recorded are the target's text X_t ~ p and, drawn apart from it, what the draft would draft,
Y_t ~ q. Rejection sampling draws them together: token x is drafted and accepted with probability
min(p(x), q(x)). At a place where the text is X_t, the candidate therefore was X_t with probability
min(1, q(X_t)/p(X_t)), and else one that is rejected. A round meets each place at most once, so that
one draw for every place says what is accepted in any round.

Two things are approximate. Tokens outside of the recorded top_k, whose q is unknown, share one
probability of acceptance: the one with which the mean is that of Σ min(p, q). And a rejected
candidate is the recorded Y_t ≠ X_t, a draw of q and not of its excess over p; that changes how much
is drafted behind a rejection, not what is accepted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from specdec_core.recordings.schema import Trace


def verified(trace: Trace, seed: int = 0) -> Trace:
    """`trace` with the target's token in the place of the draft's wherever one is accepted."""
    rows, most = trace.trajectory, trace.header.top_k
    p, rank = trace.target_probability[rows], trace.rank[rows]
    known = rank < most
    q = trace.top_probs[rows, np.minimum(rank, most - 1)]
    accepted = np.minimum(1, q / p)
    rest = (trace.overlap[rows].sum() - accepted[known].sum()) / max((~known).sum(), 1)
    accepted = np.where(known, accepted, np.clip(rest, 0, 1))
    q = np.where(known, q, accepted * p)
    # Y_t is X_t with probability q(X_t) as recorded; other Y_t make up the difference.
    draws = np.random.default_rng(seed).random(len(rows)) * (1 - q)
    now = ~trace.agrees & (draws < accepted - q)
    at = rows[now]
    changes = {
        "draft_token": trace.target_token[at],
        "probability": q[now],
        "draft_token_target_probability": p[now],
    }
    columns = dict(trace.columns)
    for name, values in changes.items():
        columns[name] = columns[name].copy()
        columns[name][at] = values
    return replace(trace, columns=columns)
