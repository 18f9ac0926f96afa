"""Whether what an engine writes fits the target's distribution, on a pair whose distribution is
known exactly."""

import numpy as np
from scipy.stats import chisquare

from specdec_core.config import Sampling
from specdec_core.models.pair import Pair
from tests.specdec_core.kinds import configured
from tests.toy_pair import VOCABULARY, exact_distribution, sample_counts, toy_pair

LENGTH = 4  # of the continuations; the first token has no candidates
_LEAST_EXPECTED = 10  # samples of a text; rarer texts count as one


def fit(
    drafter: object, sampling: Sampling, samples: int = 2_500, pair: Pair | None = None
) -> float:
    """p-value of the exact distribution of all continuations, given samples of them. 2,500 find,
    99 times in 100, what differs by a χ² divergence of some 0.05, a total variation of 0.11."""
    pair = toy_pair() if pair is None else pair
    configuration = configured(drafter, sampling)
    return p_value(
        sample_counts(pair, configuration, samples, LENGTH),
        exact_distribution(pair, sampling, LENGTH),
    )


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Of a chi-square goodness of fit of `counts` (sequences,) to probabilities (sequences,)."""
    return goodness_of_fit(*alike_behind_the_first(counts, expected))


def goodness_of_fit(counts: np.ndarray, target: np.ndarray) -> float:
    """The chi-square test's p-value; 0 where a text of probability 0 was sampled."""
    if counts[target == 0].any():
        return 0.0
    observed, share = _pooled(counts, target)
    return float(chisquare(observed, share / share.sum() * observed.sum()).pvalue)


def _pooled(counts: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both with rarely expected texts pooled at the end, and without impossible texts that were not
    seen."""
    rare = (target > 0) & (target * counts.sum() < _LEAST_EXPECTED)
    counts = np.append(counts[~rare], counts[rare].sum())
    target = np.append(target[~rare], target[rare].sum())
    possible = (target > 0) | (counts > 0)
    return counts[possible], target[possible]


def alike_behind_the_first(
    counts: np.ndarray, expected: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of all sequences of some length, in the order of counting, `counts` (sequences,) and
    probabilities (sequences,): those expected less than 10 times are put together with the others
    of them that differ in the first token only, which no drafter has proposed. A sequence that
    cannot happen stays alone."""
    rare = (expected > 0) & (expected * counts.sum() < _LEAST_EXPECTED)

    def put_together(own: np.ndarray) -> np.ndarray:
        alike = np.where(rare, own, 0).reshape(VOCABULARY, -1).sum(axis=0)
        return np.append(own[~rare], alike)

    return put_together(counts), put_together(expected)
