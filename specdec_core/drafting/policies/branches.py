"""Length policies on trees: which branches go on."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_core.drafting.policies.policy import LengthPolicy, Rule
from specdec_core.drafting.policies.signals import Signals


class Branches:
    """Asks `policy` about the branches of trees, several for each slot.

    A rule is applied to every branch, with the product of its values along the branch. Any other
    policy follows one sequence of candidates in a slot: it is shown the first of the slot's
    branches, the most confident one, and decides for all.
    """

    def __init__(self, policy: LengthPolicy) -> None:
        self.policy = policy

    def go_on(self, signals: Signals, before: Sequence[float]) -> tuple[list[bool], list[float]]:
        """For each of n candidates (branches of a slot best first) whether to draft after it, and
        its branch's product; `before` (n,) has the products up to the candidates before, 1 at
        first."""
        policy = self.policy
        if not isinstance(policy, Rule):
            return self._by_the_first(signals), list(before)
        answers, products = [], []
        values = policy.values(signals)
        for position, value, product in zip(signals.positions, values, before, strict=True):
            if policy.lagging and position == 1:
                value = 1.0
            value = float(product * value) if policy.cumulative else value
            answers.append(bool(position < policy.min_tokens or not policy.stops(value)))
            products.append(value if policy.cumulative else 1.0)
        return answers, products

    def _by_the_first(self, signals: Signals) -> list[bool]:
        first: dict[int, int] = {}
        for place, slot in enumerate(signals.slots):
            first.setdefault(slot, place)
        shown = signals.only(list(first.values()))
        decided = dict(zip(shown.slots, self.policy.go_on(shown), strict=True))
        return [decided[slot] for slot in signals.slots]
