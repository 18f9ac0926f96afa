"""Several length policies in one drafter: each slot follows one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specdec_core.drafting.policies.policy import LengthPolicy, PolicyOutcome
from specdec_core.drafting.policies.signals import Signals


class PerSlot(LengthPolicy):
    """Slot s follows `policies[chosen[s]]`; the slots still go through the draft model together."""

    def __init__(self, policies: Mapping[int, LengthPolicy]) -> None:
        self.policies = dict(policies)
        self.chosen: dict[int, int] = {}
        self.needs_hidden = any(policy.needs_hidden for policy in policies.values())
        self.learns = any(policy.learns for policy in policies.values())
        self.reads = sorted({name for policy in policies.values() for name in policy.reads})
        self.rests = any(policy.rests for policy in policies.values())

    def limit(self, slot: int, batch: int = 1) -> int:
        return self._of(slot).limit(slot, batch)

    def go_on(self, signals: Signals) -> Sequence[bool]:
        places: dict[int, list[int]] = {}
        for place, slot in enumerate(signals.slots):
            places.setdefault(self.chosen[slot], []).append(place)
        answers = [False] * len(signals.slots)
        for number, chosen in places.items():
            shown = signals if len(places) == 1 else signals.only(chosen)
            for place, answer in zip(chosen, self.policies[number].go_on(shown), strict=True):
                answers[place] = answer
        return answers

    def observe(self, slot: int, outcome: PolicyOutcome) -> None:
        self._of(slot).observe(slot, outcome)

    def reset(self, slot: int) -> None:
        for policy in self.policies.values():
            policy.reset(slot)

    def _of(self, slot: int) -> LengthPolicy:
        return self.policies[self.chosen[slot]]
