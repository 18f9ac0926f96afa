"""The papers' equations between forward passes, tokens and seconds."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_core.tokens.statistics import Counts


def latency(
    t_draft: float, t_target: float, discard_rate: float, verification_rate: float
) -> float:
    """SpecDec++, Eq. 5.1: seconds a token."""
    return t_draft + t_draft * discard_rate + (t_target - t_draft) * verification_rate


def oracle_counts(disagreements: Sequence[int], lengths: Sequence[int]) -> Counts:
    """SpecDec++, Thm 4.1: a draft that always stops just before its next rejection.

    For each prompt, `disagreements` is |S|, the greedy positions at which draft and target differ,
    and `lengths` is N. N_target = |S| + 1 (at most N), N_discarded = 0, and every other token is
    drafted and accepted.
    """
    n = n_target = 0
    for differing, length in zip(disagreements, lengths, strict=True):
        if not 0 <= differing <= length:
            raise ValueError(f"{differing} disagreements in {length} tokens")
        n += length
        n_target += min(differing + 1, length)
    drafted = n - n_target
    return Counts(
        requests=len(lengths),
        n=n,
        n_draft=drafted,
        n_target=n_target,
        n_discarded=0,
        n_drafted=drafted,
        n_accepted=drafted,
        n_target_tokens=n_target,
    )
