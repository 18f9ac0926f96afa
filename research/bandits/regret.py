"""The cost of choosing among arms: stopping-time regret against the best arm in hindsight, and the
paper's bounds on it (BanditSpec, Hou et al., 2025)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import numpy as np

from specdec_core.tokens.statistics import Round


@dataclass(frozen=True, eq=False)
class RoundCosts:
    """How a request, or a batch of requests that began together, was decoded: for each round the
    `tokens` that it added and its `cost`, 1 a request for a count of rounds or its seconds. Both
    have shape (rounds,)."""

    tokens: np.ndarray
    cost: np.ndarray

    @classmethod
    def of(cls, *batch: Sequence[Round], timed: bool = False) -> RoundCosts:
        """The rounds of the requests of a batch, counted or in seconds, which they share."""
        steps = [[r for r in step if r is not None] for step in zip_longest(*batch)]
        tokens = np.array([sum(r.generated for r in step) for step in steps])
        if not timed:
            return cls(tokens, np.array([float(len(step)) for step in steps]))
        return cls(tokens, np.array([max(r.seconds for r in step) for step in steps]))

    @cached_property
    def reached(self) -> np.ndarray:
        """Tokens (rounds + 1,) after each round, from 0 on."""
        return np.concatenate([[0], np.cumsum(self.tokens)])

    @cached_property
    def spent(self) -> np.ndarray:
        """Cost (rounds + 1,) after each round, from 0 on: at its end ST, the stopping time."""
        return np.concatenate([[0.0], np.cumsum(self.cost)])

    def cost_of(self, tokens: np.ndarray) -> np.ndarray:
        """The cost of the first `tokens` tokens: within a round in proportion, beyond the last one
        (outputs may differ by a near-tie) at the mean."""
        within = np.interp(tokens, self.reached, self.spent)
        beyond = np.maximum(tokens - self.reached[-1], 0)
        return np.asarray(within + beyond * self.spent[-1] / max(self.reached[-1], 1))


@dataclass(frozen=True, eq=False)
class Regret:
    """Regret after each round, over the requests in their order."""

    tokens: np.ndarray  # (rounds,) written so far
    spent: np.ndarray  # (rounds,) their cost
    regret: np.ndarray  # (rounds,) the cost beyond that of the same tokens with the reference

    @property
    def total(self) -> float:
        """ST of the one less ST of the other."""
        return float(self.regret[-1])


def best_arm(arms: Sequence[Sequence[RoundCosts]]) -> int:
    """The arm with the least cost over all its requests, i*."""
    costs = [sum(course.spent[-1] for course in courses) for courses in arms]
    return int(np.argmin(costs))


def best_of_each(arms: Sequence[Sequence[RoundCosts]]) -> list[RoundCosts]:
    """Of each request the course of the arm that cost least for its tokens.

    The paper's i*(pt, ν) is the best for a prompt on average; in hindsight the best of one decoding
    is at least as good, so regret against it is at most too large.
    """
    return [
        min(courses, key=lambda course: course.spent[-1] / max(course.reached[-1], 1))
        for courses in zip(*arms, strict=True)
    ]


def regret(courses: Sequence[RoundCosts], reference: Sequence[RoundCosts]) -> Regret:
    """The cost of `courses` beyond that of `reference`, decodings of the same requests in the same
    order.

    If `reference` is the best arm's, the last entry is the stopping-time regret
    ST(ALG) − ST(ALG_i*). A request that ends earlier than the reference's is compared
    up to its end.
    """
    if len(courses) != len(reference) or not courses:
        raise ValueError(f"{len(courses)} requests against {len(reference)}")
    tokens, spent, baseline = [0.0], [0.0], [0.0]
    for course, same in zip(courses, reference, strict=True):
        tokens.extend(tokens[-1] + course.reached[1:])
        spent.extend(spent[-1] + course.spent[1:])
        baseline.extend(baseline[-1] + same.cost_of(course.reached[1:]))
    cost = np.array(spent[1:])
    return Regret(np.array(tokens[1:]), cost, cost - np.array(baseline[1:]))


def mean_tokens(courses: Iterable[RoundCosts]) -> float:
    """μ of an arm: tokens a round of a request, from courses that count rounds."""
    courses = list(courses)
    return float(sum(c.reached[-1] for c in courses) / sum(c.spent[-1] for c in courses))


def hardness(means: Sequence[float]) -> float:
    """H = Σ 1 / (μ_i* Δ_i) over the arms that are worse than the best."""
    best = max(means)
    return sum(1 / (best * (best - mean)) for mean in means if mean < best)


def ucb_bound(means: Sequence[float], longest: int, lengths: np.ndarray) -> np.ndarray:
    """The order of UCBSpec's stopping-time regret, H L² log E[len], at each of `lengths` tokens.
    The theorem leaves out the constant; here it is 1."""
    return np.asarray(hardness(means) * longest**2 * np.log(np.maximum(lengths, 1)))


def tgd_lower_bound(means: Sequence[float], lengths: np.ndarray) -> np.ndarray:
    """The lower bound on stopping-time regret at each of `lengths` tokens, where accepted lengths
    have the truncated geometric distribution (Eq. 1 and the proposition on tightness):
    H · p(1 − p^L)/(1 − p) · log len, with p of the best arm. The mean of that arm is
    μ = 1 + p + … + p^L, so the factor is μ − 1. It holds as lengths go to infinity."""
    return np.asarray(hardness(means) * (max(means) - 1) * np.log(np.maximum(lengths, 1)))


def exp3_bound(arms: int, longest: int, rounds: np.ndarray) -> np.ndarray:
    """The order of EXP3Spec's stopping-time regret, L √(ST K log K), where ST are the `rounds` of
    the best arm. The theorem leaves out the constant; here it is 1."""
    return longest * np.sqrt(np.asarray(rounds) * arms * math.log(arms))
