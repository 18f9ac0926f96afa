"""What more training would bring: a power law through a training's evaluations.

With y the score after n tokens and L the most that it can be, L - y = a n^-b is a line in
logarithms. It is an extrapolation: it knows nothing of how the rate falls, of a model that is too
small for more, or of texts that are seen again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LearningCurve:
    """The law that a curve's points follow: `limit` - y = exp(`intercept`) n^`slope`."""

    limit: float
    intercept: float
    slope: float

    def at(self, tokens: float) -> float:
        """The score expected after so many tokens."""
        return float(self.limit - np.exp(self.intercept + self.slope * np.log(tokens)))

    def tokens_for(self, score: float) -> float:
        """The tokens after which a score is expected; infinite for one that is never reached."""
        if score >= self.limit or self.slope >= 0:
            return float("inf")
        return float(np.exp((np.log(self.limit - score) - self.intercept) / self.slope))


def fitted(tokens: Sequence[float], scores: Sequence[float], limit: float) -> LearningCurve | None:
    """The law through the points by least squares in logarithms; None of fewer than three points
    below the limit."""
    points = [(n, limit - y) for n, y in zip(tokens, scores, strict=True) if n > 0 and y < limit]
    if len(points) < 3:
        return None
    logarithms = np.log(np.asarray(points))
    slope, intercept = np.polyfit(logarithms[:, 0], logarithms[:, 1], 1)
    return LearningCurve(limit, float(intercept), float(slope))
