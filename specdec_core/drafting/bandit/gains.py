"""What bandits that serve the same traffic tell each other.

All that a bandit has learned are sums over rounds. Of UCBSpec these are n_i and ΣY, by time also ΣT
and second moments: sums over several bandits are those of one that has seen all their rounds. Of
EXP3Spec they are ΣẐ: each Ẑ is divided by the probability that its own bandit drew the arm with, so
it is an unbiased estimate of the loss there, and so is the sum. Between exchanges each draws from
what it knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Of a state: lists with one entry an arm.
SUMS = (
    "rounds",
    "tokens",
    "seconds",
    "losses",
    "tokens_squared",
    "products",
    "seconds_squared",
)


def gained(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, list[float]]:
    """What a bandit has learned between two of its states."""
    return {
        name: [new - old for new, old in zip(now[name], before[name], strict=True)] for name in SUMS
    }


def added(gains: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The sum of at least one gain."""
    return {
        name: [sum(values) for values in zip(*(gain[name] for gain in gains), strict=True)]
        for name in SUMS
    }
