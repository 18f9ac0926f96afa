"""Bounds on a draft token's acceptance from entropies (SVIP, §2.2 and appendices B, C).

p is the target's distribution, q the draft's, and β = Σ min(p, q) the chance that a token drawn
from q is accepted (Eq. 1). H_q is q's entropy and H_{q,p} = -Σ q log p the cross entropy, so
KL(q‖p) = H_{q,p} - H_q. Entropies are in nats; all functions work on arrays. Where the
distributions nearly agree, entropies recorded in float32 leave the bounds an error of about 1e-3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def divergence(entropy: ArrayLike, cross_entropy: ArrayLike) -> np.ndarray:
    """KL(q‖p) from H_q and H_{q,p}, at least 0 despite rounding."""
    kl = np.asarray(cross_entropy, dtype=float) - np.asarray(entropy, dtype=float)
    return np.asarray(np.maximum(kl, 0))


def oracle_bound(entropy: ArrayLike, cross_entropy: ArrayLike) -> np.ndarray:
    """Eq. 4: β ≥ 1 - sqrt(½ H_{q,p} - ½ H_q), Pinsker's inequality. Below 0, and empty, where the
    distributions differ by more than 2 nats."""
    return 1 - np.sqrt(divergence(entropy, cross_entropy) / 2)


def bretagnolle_huber_bound(entropy: ArrayLike, cross_entropy: ArrayLike) -> np.ndarray:
    """Eq. 12: β ≥ 1 - sqrt(1 - exp(-KL)), never below 0.

    1 - β is the total variation distance δ, so 1 ± δ are Σ max(p, q) and Σ min(p, q). By
    Cauchy-Schwarz (Σ sqrt(p q))² = (Σ sqrt(max · min))² ≤ (1 + δ)(1 - δ) = 1 - δ², and by Jensen
    Σ sqrt(p q) = Σ q sqrt(p/q) ≥ exp(-KL/2). Hence δ² ≤ 1 - exp(-KL).
    """
    return 1 - np.sqrt(-np.expm1(-divergence(entropy, cross_entropy)))


def entropy_ratio(entropy: ArrayLike, cross_entropy: ArrayLike) -> np.ndarray:
    """γ = H_{q,p} / H_q, at least 1; NaN where q is certain and has no entropy to compare with."""
    entropy = np.asarray(entropy, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.asarray(cross_entropy, dtype=float) / entropy
    return np.where(entropy > 0, np.maximum(ratio, 1), np.nan)


def approximation_bound(entropy: ArrayLike, c: float) -> np.ndarray:
    """Eq. 6: 1 - sqrt(c H_q), which needs the draft alone. Below the oracle bound, and so below β,
    where γ ≤ 2c + 1 (Eq. 8)."""
    return 1 - np.sqrt(c * np.asarray(entropy, dtype=float))


@dataclass(frozen=True)
class RatioFit:
    """The most likely distribution of γ, of a family, for recorded positions."""

    parameters: tuple[float, float]
    distribution: Any  # of scipy

    @classmethod
    def gaussian(cls, entropy: ArrayLike, cross_entropy: ArrayLike) -> RatioFit:
        """γ ~ N(mean, deviation²) (Eq. 14), which are the `parameters`. Positions without a finite
        γ are left out. Raises ValueError where fewer than two different values are left."""
        from scipy import stats  # takes a second to import

        ratio = entropy_ratio(entropy, cross_entropy)
        mean, deviation = stats.norm.fit(_several(ratio[np.isfinite(ratio)]))
        return cls((float(mean), float(deviation)), stats.norm(mean, deviation))

    @classmethod
    def gamma(cls, entropy: ArrayLike, cross_entropy: ArrayLike) -> RatioFit:
        """γ = 1 + X with X ~ Gamma(shape, rate) (Eq. 9 and appendix C.2), which are the
        `parameters`.

        Positions are left out where γ - 1 is 0 or has no finite value: the draft is certain, agrees
        with the target to the last digit, or proposes what the target excludes. Raises ValueError
        where fewer than two different values are left.
        """
        from scipy import stats

        excess = entropy_ratio(entropy, cross_entropy) - 1
        usable = _several(excess[np.isfinite(excess) & (excess > 0)])
        shape, _, scale = stats.gamma.fit(usable, floc=0)
        return cls((float(shape), 1 / float(scale)), stats.gamma(shape, loc=1, scale=scale))

    def reliability(self, c: ArrayLike) -> np.ndarray:
        """P(γ ≤ 2c + 1), how often the approximation bound is one."""
        return np.asarray(self.distribution.cdf(2 * np.asarray(c, dtype=float) + 1))


def _several(values: np.ndarray) -> np.ndarray:
    if len(np.unique(values)) < 2:
        raise ValueError("too few positions to fit the ratio of entropies")
    return values
