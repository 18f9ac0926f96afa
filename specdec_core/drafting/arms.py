"""Several drafters; one of them drafts for a slot in each round."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from specdec_core.config import DrafterSettings
from specdec_core.drafting.chain import LiveChainModel
from specdec_core.drafting.draft_model.drafter import DraftModelDrafter
from specdec_core.drafting.drafter import Drafter, Outcome, Resources, SlotState
from specdec_core.drafting.policies.policy import LengthPolicy, PolicyOutcome
from specdec_core.drafting.policies.signals import Signals
from specdec_core.models.runner import ModelRunner
from specdec_core.tokens.token_tree import TokenTree


@dataclass(slots=True)
class Pull:
    """A slot's round in progress. `arm` is None where no drafter drafts."""

    arm: int | None
    length: int  # of the sequence before the round
    other_seconds: float = 0.0  # of drafting by other arms


class ArmsDrafter(Drafter):
    """Drafts by the arm that :meth:`choose` names for each slot. The other arms see what is
    committed, so that they draft as well when they are chosen.

    Slots with the same arm draft together. So do all arms that are chains of one draft model,
    whatever their length policies. A draft model that not all arms use reads a sequence only when
    one of them is chosen; this is part of the round's time.
    """

    def __init__(self, arms: Sequence[DrafterSettings], resources: Resources) -> None:
        self.arms, used = [], []
        for arm in arms:
            runners: dict[int, ModelRunner] = {}
            self.arms.append(_recording_use(resources, runners).build(arm))
            used.append(runners)
        for number, runner in {n: r for runners in used for n, r in runners.items()}.items():
            runner.lazy = runner.lazy or not all(number in runners for runners in used)
        self.shapes = [shape for drafter in self.arms for shape in drafter.shapes]
        self._drafters, self._policies = _joined(self.arms)  # of each arm
        self.parts = list(dict.fromkeys(self._drafters))
        self._pulls: dict[int, Pull] = {}  # by slot

    @abstractmethod
    def choose(self, sequence: SlotState) -> int | None:
        """The arm that drafts for a slot in this round; None: no drafter does."""

    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        pulls = [Pull(self.choose(s), len(s.tokens)) for s in sequences]
        self._pulls |= {s.slot: pull for s, pull in zip(sequences, pulls, strict=True)}
        groups = self._groups(sequences)
        for sequence, pull in zip(sequences, pulls, strict=True):
            if pull.arm is not None and (policy := self._policies[pull.arm]) is not None:
                policy.chosen[sequence.slot] = pull.arm
        trees = [TokenTree() for _ in sequences]
        shares = [0.0] * len(sequences)  # of each slot in the drafting
        began = start = perf_counter()
        for drafter, places in groups.items():
            drafted = drafter.propose([sequences[place] for place in places])
            now = perf_counter()
            most = max(tree.draft_forwards for tree in drafted)
            for place, tree in zip(places, drafted, strict=True):
                tree.arm = pulls[place].arm
                trees[place] = tree
                share = tree.draft_forwards / most if most else 1.0
                shares[place] = share * (now - start)
            start = now
        for pull, seconds in zip(pulls, shares, strict=True):
            pull.other_seconds = start - began - seconds
        return trees

    def arrived(self, sequences: Sequence[SlotState], trees: Sequence[TokenTree]) -> None:
        for drafter, places in self._groups(sequences).items():
            drafter.arrived([sequences[p] for p in places], [trees[p] for p in places])

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        arm = self._pulls[sequence.slot].arm  # not tree.arm: arms among the arms set that, too
        for drafter in self.parts:
            if arm is not None and drafter is self._drafters[arm]:
                drafter.observe(sequence, outcome)
            else:
                drafter.missed(sequence)

    def _groups(self, sequences: Sequence[SlotState]) -> dict[Drafter, list[int]]:
        """The places of the sequences that each drafter drafts for."""
        groups: dict[Drafter, list[int]] = {}
        for place, sequence in enumerate(sequences):
            if (arm := self._pulls[sequence.slot].arm) is not None:
                groups.setdefault(self._drafters[arm], []).append(place)
        return groups


def _recording_use(resources: Resources, runners: dict[int, ModelRunner]) -> Resources:
    """`resources` that add the draft models in use to `runners`."""

    def draft_runner(name: str | None) -> ModelRunner:
        runner = resources.draft_runner(name)
        runners[id(runner)] = runner
        return runner

    return replace(resources, draft_runner=draft_runner)


def _joined(arms: Sequence[Drafter]) -> tuple[list[Drafter], list[PerSlot | None]]:
    """The drafter of each arm, and the joint policy that it belongs to. Chains of one draft model
    share one drafter with a policy for each slot."""
    drafters = list(arms)
    policies: list[PerSlot | None] = [None] * len(arms)
    chains: dict[int, dict[int, DraftModelDrafter]] = {}
    for number, arm in enumerate(arms):
        if isinstance(arm, DraftModelDrafter) and isinstance(arm.model, LiveChainModel):
            chains.setdefault(id(arm.model.runner), {})[number] = arm
    for alike in chains.values():
        if len(alike) > 1:
            joint = next(iter(alike.values()))
            joint.policy = policy = PerSlot({n: arm.policy for n, arm in alike.items()})
            for number in alike:
                drafters[number], policies[number] = joint, policy
    return drafters, policies


class PerSlot(LengthPolicy):
    """Slot s follows `policies[chosen[s]]`; the slots still go through the draft model together."""

    def __init__(self, policies: Mapping[int, LengthPolicy]) -> None:
        self.policies = dict(policies)
        self.chosen: dict[int, int] = {}
        self.learns = any(policy.learns for policy in policies.values())
        self.reads = sorted({name for policy in policies.values() for name in policy.reads})

    def limit(self, slot: int) -> int:
        return self._of(slot).limit(slot)

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
