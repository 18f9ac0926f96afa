"""Least squares for costs that cannot be negative."""

from __future__ import annotations

from itertools import combinations

import numpy as np


def nonnegative_least_squares(columns: np.ndarray, values: np.ndarray) -> list[float]:
    """argmin over x ≥ 0 of |columns·x − values|², for a handful of columns.

    The solution is the plain least-squares solution over its non-zero columns, so it is the best
    non-negative one among all subsets. Smaller subsets win ties, which also decides between columns
    that the measurements do not distinguish.
    """
    count = columns.shape[1]
    # Columns differ by orders of magnitude (1 against context · batch).
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1
    scaled = columns / scale
    best, least = np.zeros(count), float(values @ values)
    tolerance = 1e-9 * least
    for size in range(1, count + 1):
        for subset in map(list, combinations(range(count), size)):
            solution = np.linalg.lstsq(scaled[:, subset], values, rcond=None)[0]
            residual = float(np.square(scaled[:, subset] @ solution - values).sum())
            if (solution >= 0).all() and residual < least - tolerance:
                best, least = np.zeros(count), residual
                best[subset] = solution
    return list(map(float, best / scale))


def r_squared(values: np.ndarray, predicted: np.ndarray) -> float:
    """Share of the variance of `values` that is explained; 1 when there is none."""
    spread = float(np.square(values - values.mean()).sum())
    residual = float(np.square(values - predicted).sum())
    return 1 - residual / spread if spread else float(np.isclose(residual, 0))
