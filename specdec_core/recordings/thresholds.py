"""The best threshold of a policy on a recording.

Only the compared values separate thresholds, so the cost is a step function of the threshold with
one step for each distinct value. The search tries quantiles of the values, which are dense where
decisions are made, and then ever finer ones around the cheapest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from annotated_types import Le

from specdec_core.config import Configuration, PolicySettings
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.recordings.replay import Replay
from specdec_core.tokens.statistics import Counts

Cost = Callable[[Counts], float]


def decision_cost(c1: float, c2: float) -> Cost:
    """SpecDec++'s cost of a run beyond the oracle's time T_0 (Eq. 3.2 and Thm 4.2):
    c1 · N_discarded + c2 · N_target with c1 = t_draft and c2 = t_target - t_draft. As in
    :func:`specdec_core.cost.immediate_costs`, a target's token after an accepted end token counts
    as discarded, so that no threshold gains by where its rounds end."""

    def cost(counts: Counts) -> float:
        wasted = counts.n_target - counts.n_target_tokens
        return c1 * (counts.n_discarded + wasted) + c2 * counts.n_target

    return cost


@dataclass(frozen=True)
class BestThreshold:
    """The result of a search."""

    policy: PolicySettings  # with the best threshold
    threshold: float
    cost: float
    counts: Counts
    curve: list[tuple[float, float]]  # all thresholds that were tried, rising, and their costs


def best_threshold(
    replay: Replay,
    policy: PolicySettings,
    cost: Cost,
    draft: str | None = None,
    points: int = 48,
    refinements: int = 2,
) -> BestThreshold:
    """The threshold of `policy` at which the recorded prompts cost least.

    Args:
        replay: of the recorded prompts.
        policy: one that compares with a threshold (confidence, svip, confidence_product, specdecpp,
            decision). Its threshold is ignored, everything else is kept.
        cost: of counts; see :func:`decision_cost`.
        draft: a recorded draft; unset, the first.
        points: thresholds tried in each pass; with at least as many as there are distinct values,
            the first pass tries every threshold that makes a difference.
        refinements: passes after the first.

    Raises:
        TypeError: the policy compares nothing with a threshold.
        UserError: the policy cannot be replayed.
    """
    edges = distinct_thresholds(replay, policy, draft)
    tried: dict[int, tuple[float, PolicySettings, Counts]] = {}

    def attempt(index: int) -> None:
        attempted = policy.model_copy(update={"threshold": float(edges[index])})
        drafter = DraftModelSettings(draft=draft, policy=attempted)
        rounds = replay.run(Configuration(drafter=drafter, sampling=replay.header.sampling))
        tried[index] = (cost(rounds.counts), attempted, rounds.counts)

    low, high = 0, len(edges) - 1
    for _ in range(1 + refinements):
        for index in np.unique(np.linspace(low, high, points).round().astype(int)).tolist():
            if index not in tried:
                attempt(index)
        order = sorted(tried)
        at = order.index(min(order, key=lambda index: tried[index][0]))
        low, high = order[max(at - 1, 0)], order[min(at + 1, len(order) - 1)]
    least, best, counts = tried[order[at]]
    curve = [(float(edges[index]), tried[index][0]) for index in order]
    return BestThreshold(best, float(edges[order[at]]), least, counts, curve)


def distinct_thresholds(
    replay: Replay, policy: PolicySettings, draft: str | None = None
) -> np.ndarray:
    """All thresholds that the recording distinguishes, rising: the middle between each two values
    that `policy` might compare, one that none reaches, and one that all do."""
    if "threshold" not in type(policy).model_fields:
        raise TypeError(f"policy {policy.kind} has no threshold")
    track, rule = replay.track(draft), replay.rule(draft, policy)
    # After a round's first candidates, and after the last it can have, nothing is decided.
    candidate = np.arange(1, track.header.max_draft + 1)
    last = np.minimum(track.bound, policy.max_tokens)[:, None]
    decides = (candidate >= rule.min_tokens) & (candidate < last)
    values = np.unique(track.compared(rule)[decides])
    between = (values[1:] + values[:-1]) / 2
    edges = rule.thresholds(np.array([0.0, *between, values.max(initial=0.0) + 1]))
    limits = type(policy).model_fields["threshold"].metadata
    most: Any = next((limit.le for limit in limits if isinstance(limit, Le)), np.inf)
    return np.sort(np.clip(edges, 0, most))
