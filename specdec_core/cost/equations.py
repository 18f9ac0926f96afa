"""The papers' equations between forward passes, tokens and seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from specdec_core.cost.fitting import nonnegative_least_squares, r_squared
from specdec_core.tokens.statistics import Counts


def latency(
    t_draft: float, t_target: float, discard_rate: float, verification_rate: float
) -> float:
    """SpecDec++, Eq. 5.1: seconds a token."""
    return t_draft + t_draft * discard_rate + (t_target - t_draft) * verification_rate


def improvement_factor(alpha: float, gamma: int, c: float) -> float:
    """Leviathan et al. (2023), Thm 3.8: expected speedup of `gamma` candidates a round when each
    is accepted with probability `alpha` and a draft forward costs `c` target forwards."""
    expected = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return expected / (gamma * c + 1)


def post_use_speedup(mat: float, utilisation: float, t_draft: float, t_target: float) -> float:
    """Post-use / Pre-cut, Eq. 3: 1/S = 1/MAT + t_draft / (Util · t_target).

    `mat` is N/N_target and `utilisation` N/N_draft, infinite without draft forwards. The same as
    what Eq. 3.1 of SpecDec++ gives: S = t_target · N / (t_draft · N_draft + t_target · N_target).
    """
    if not (mat > 0 and utilisation > 0 and t_target > 0):
        raise ValueError(
            f"need MAT, utilisation and t_target > 0, got {mat}, {utilisation} and {t_target}"
        )
    return 1 / (1 / mat + t_draft / (utilisation * t_target))


def identity_gap(counts: Counts) -> int:
    """How far counts are from Lemma 3.1's identity N_draft + N_target = N + N_discarded.

    0 for every chain whose tokens each cost one draft forward. Verifications whose own token was
    discarded, because the request ended on an accepted token (EOS, a stop string), are left out.
    Negative for drafters that get tokens without a forward.
    """
    wasted = counts.n_target - counts.n_target_tokens
    return counts.n_draft + counts.n_target - wasted - counts.n - counts.n_discarded


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


@dataclass(frozen=True)
class ForwardTimes:
    """Effective forward seconds in real runs."""

    t_draft: float
    t_target: float
    r2: float


def regress_forward_times(runs: Iterable[tuple[int, int, float]]) -> ForwardTimes:
    """SpecDec++, §5.2: (t_draft, t_target) from (N_draft, N_target, T_total) of real runs, by
    least squares on Eq. 3.1 without an intercept. T_total is in seconds, without prefill."""
    table = np.array(list(runs), dtype=float).reshape(-1, 3)
    passes, seconds = table[:, :2], table[:, 2]
    if np.linalg.matrix_rank(passes) < passes.any(axis=0).sum() or not passes.any():
        raise ValueError("runs too alike to separate the draft's time from the target's")
    times = nonnegative_least_squares(passes, seconds)
    return ForwardTimes(times[0], times[1], r_squared(seconds, passes @ np.array(times)))
