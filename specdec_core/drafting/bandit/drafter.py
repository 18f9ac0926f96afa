"""A bandit chooses who drafts, anew for every round of a slot (BanditSpec, Hou et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from specdec_core.base.errors import UserError
from specdec_core.config import distinct_labels
from specdec_core.drafting.bandit.old_labels import old_label
from specdec_core.drafting.bandit.rules import Bandit, EXP3Spec, UCBSpec
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.drafting.draft_model.drafter import DraftModelDrafter
from specdec_core.drafting.drafter import Drafter, Outcome, Resources, SlotState
from specdec_core.drafting.policies.per_slot import PerSlot
from specdec_core.drafting.states import find_state, load_state
from specdec_core.models.runner import ModelRunner
from specdec_core.tokens.token_tree import TokenTree


@dataclass(slots=True)
class _Pull:
    """A slot's round in progress."""

    arm: int
    length: int  # of the text before the round
    other_seconds: float = 0.0  # of drafting by other arms


class BanditDrafter(Drafter):
    """Drafts by the arm that the bandit selects, and rewards the arm with the tokens that the round
    added and the time that it took.

    Slots with the same arm draft together. So do all arms that are chains of one draft model,
    whatever their length policies: a K for each request is the paper's second setting. An arm
    learns from its own rounds only. A draft model that only some arms need reads a text when one of
    them is chosen; this is part of the round's time.

    With memory "all" one bandit, `bandit`, serves all slots and all requests, else each request has
    its own.

    A round's seconds are those of the target's forward, which the slots of a batch share, and of
    drafting by the slot's arm. Of arms that drafted together, each counts its share by forwards.
    """

    def __init__(self, settings: BanditSettings, resources: Resources) -> None:
        self.bandit = build_bandit(settings)
        self.shared = settings.memory == "all"
        self.arms, used = [], []
        for arm in settings.arms:
            runners: dict[int, ModelRunner] = {}
            self.arms.append(_recording_use(resources, runners).build(arm))
            used.append(runners)
        for number, runner in {n: r for runners in used for n, r in runners.items()}.items():
            # A draft model that not all arms use reads a text only when it has to.
            runner.lazy = runner.lazy or not all(number in runners for runners in used)
        self.target_width = self.arms[0].target_width
        for arm, drafter in zip(settings.arms, self.arms, strict=True):
            if drafter.target_width != self.target_width:
                raise UserError(
                    f"bandit: {arm.label} begins its trees with {drafter.target_width} of the"
                    f" target's tokens, {settings.arms[0].label} with {self.target_width};"
                    " arms must agree"
                )
        self.shapes = [shape for drafter in self.arms for shape in drafter.shapes]
        self._drafters, self._policies = _joined(self.arms)
        self._bandits: dict[int, Bandit] = {}  # by slot; empty if shared
        self._pulls: dict[int, _Pull] = {}  # by slot

    def prepare(self, seconds: float) -> bool:
        until = perf_counter() + seconds
        return all([arm.prepare(max(until - perf_counter(), 0.0)) for arm in self.arms])

    def open(self, sequences: Sequence[SlotState]) -> None:
        for drafter in dict.fromkeys(self._drafters):
            drafter.open(sequences)
        if not self.shared:
            for sequence in sequences:
                self._bandits[sequence.slot] = deepcopy(self.bandit)

    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        pulls = [_Pull(self.of(s.slot).select(s.slot), len(s.tokens)) for s in sequences]
        self._pulls |= {s.slot: pull for s, pull in zip(sequences, pulls, strict=True)}
        groups = self._groups(sequences)
        for sequence, pull in zip(sequences, pulls, strict=True):
            if (policy := self._policies[pull.arm]) is not None:
                policy.chosen[sequence.slot] = pull.arm
        trees: list[TokenTree] = [TokenTree()] * len(sequences)
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
        slot = sequence.slot
        pull = self._pulls[slot]  # not tree.arm: a bandit among the arms sets that, too
        added = len(sequence.tokens) - pull.length
        if added:  # 0 where the target begins the trees, in a request's first round
            self.of(slot).update(pull.arm, added, outcome.seconds - pull.other_seconds, slot)
        for drafter in dict.fromkeys(self._drafters):
            if drafter is self._drafters[pull.arm]:
                drafter.observe(sequence, outcome)
            else:
                drafter.missed(sequence)

    def missed(self, sequence: SlotState) -> None:
        for drafter in dict.fromkeys(self._drafters):
            drafter.missed(sequence)

    def close(self, sequence: SlotState) -> None:
        for drafter in dict.fromkeys(self._drafters):
            drafter.close(sequence)

    @classmethod
    def check_state(cls, settings: BanditSettings, state: dict[str, Any], source: str) -> None:
        build_bandit(settings).restore(state, source)

    def state(self) -> dict[str, Any] | None:
        return self.bandit.state() if self.shared else None

    def load(self, state: dict[str, Any], source: str = "the state") -> None:
        if self.shared:
            self.bandit.restore(state, source)

    def learned(self) -> list[dict[str, Any]] | None:
        if not self.shared:
            return None
        rows = self.bandit.frame().drop(columns="preference").to_dict("records")
        return [{str(k): None if v != v else v for k, v in row.items()} for row in rows]

    def of(self, slot: int) -> Bandit:
        """The bandit that chooses for `slot`."""
        return self.bandit if self.shared else self._bandits[slot]

    def _groups(self, sequences: Sequence[SlotState]) -> dict[Drafter, list[int]]:
        """The places of the sequences that each drafter drafts for."""
        groups: dict[Drafter, list[int]] = {}
        for place, sequence in enumerate(sequences):
            drafter = self._drafters[self._pulls[sequence.slot].arm]
            groups.setdefault(drafter, []).append(place)
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
        if isinstance(arm, DraftModelDrafter):
            chains.setdefault(id(arm.runner), {})[number] = arm
    for alike in chains.values():
        if len(alike) > 1:
            joint = next(iter(alike.values()))
            joint.policy = policy = PerSlot({n: arm.policy for n, arm in alike.items()})
            for number in alike:
                drafters[number], policies[number] = joint, policy
    return drafters, policies


def build_bandit(settings: BanditSettings) -> Bandit:
    """The bandit that `settings` describe, with the saved state that they name.

    Raises:
        UserError: there is no such state, or it is of another bandit.
    """
    labels = distinct_labels(settings.arms)
    shared: dict[str, Any] = {
        "reward": settings.reward,
        "names": list(labels.values()),
        "ids": list(labels),
        "old_names": [old_label(arm) for arm in settings.arms],
    }
    arms, longest = len(settings.arms), settings.depth
    bandit: Bandit
    if settings.rule == "ucb":
        confidence, exploration = settings.confidence, settings.exploration
        bandit = UCBSpec(arms, longest, confidence=confidence, exploration=exploration, **shared)
    else:
        bandit = EXP3Spec(arms, longest, seed=settings.seed, **shared)
    if settings.state is not None:
        path = find_state(settings.state)
        bandit.restore(load_state(path), str(path))
    return bandit
