"""Least squares for costs that cannot be negative."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def nonnegative_least_squares(columns: np.ndarray, values: np.ndarray) -> list[float]:
    """argmin over x ≥ 0 of |columns·x − values|²."""
    from scipy.optimize import nnls  # takes a second to import

    # Columns differ by orders of magnitude (1 against context · batch).
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1
    solution, _ = nnls(columns / scale, values)
    return list(map(float, solution / scale))


def nonnegative_line(places: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """`values` as once + each · place, neither negative."""
    columns = np.column_stack([np.ones(len(places)), places])
    once, each = nonnegative_least_squares(columns, np.asarray(values))
    return once, each


def r_squared(values: np.ndarray, predicted: np.ndarray) -> float:
    """Share of the variance of `values` that is explained; 1 when there is none."""
    spread = float(np.square(values - values.mean()).sum())
    residual = float(np.square(values - predicted).sum())
    return 1 - residual / spread if spread else float(np.isclose(residual, 0))
