"""Short texts counted so that a fit sees the tokens that had candidates."""

from __future__ import annotations

import numpy as np

from research.drift.toy_pair import VOCABULARY

_LEAST_EXPECTED = 10


def alike_behind_the_first(
    counts: np.ndarray, expected: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of all texts of some length, in the order of counting, `counts` (texts,) and probabilities
    (texts,): those expected less than 10 times are put together with the others of them that differ
    in the first token only, which no drafter has proposed. A text that cannot happen stays alone.
    """
    rare = (expected > 0) & (expected * counts.sum() < _LEAST_EXPECTED)

    def put_together(own: np.ndarray) -> np.ndarray:
        alike = np.where(rare, own, 0).reshape(VOCABULARY, -1).sum(axis=0)
        return np.append(own[~rare], alike)

    return put_together(counts), put_together(expected)
