"""A bandit chooses a drafter for every round of a slot (BanditSpec, Hou et al., 2025)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from specdec_core.config import costless, distinct_labels, identity
from specdec_core.drafting.arms import ArmsDrafter
from specdec_core.drafting.bandit.rules import Bandit, EXP3Spec, Thompson, UCBSpec
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.drafting.drafter import Outcome, Resources, SlotState
from specdec_core.drafting.states import find_state, load_state


class BanditDrafter(ArmsDrafter):
    """Drafts by the arm that the bandit selects, and rewards the arm with the tokens that the round
    added and the time that it took.

    A K for each request, of arms that are chains of one draft model, is the paper's second setting.
    An arm learns from its own rounds only. With memory "all" one bandit, `bandit`, serves all slots
    and all requests, else each request has its own.

    A round's seconds are those of the target's forward, which the slots of a batch share, and of
    drafting by the slot's arm. Of arms that drafted together, each counts its share by forwards.
    """

    def __init__(self, settings: BanditSettings, resources: Resources) -> None:
        super().__init__(settings.arms, resources)
        self.bandit = build_bandit(settings)
        self.shared = settings.memory == "all"
        self._bandits: dict[int, Bandit] = {}  # by slot; empty if shared

    def open(self, sequences: Sequence[SlotState]) -> None:
        super().open(sequences)
        if not self.shared:
            for sequence in sequences:
                self._bandits[sequence.slot] = deepcopy(self.bandit)

    def choose(self, sequence: SlotState) -> int:
        return self.of(sequence.slot).select(sequence.slot)

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        slot = sequence.slot
        pull = self._pulls[slot]
        if pull.arm is not None:
            added = len(sequence.tokens) - pull.length
            self.of(slot).update(pull.arm, added, outcome.seconds - pull.other_seconds, slot)
        super().observe(sequence, outcome)

    @classmethod
    def check_state(cls, settings: BanditSettings, state: dict[str, Any], source: str) -> None:
        build_bandit(settings).restore(state, source)

    def state(self) -> dict[str, Any] | None:
        return self.bandit.state() if self.shared else None

    def load(self, state: dict[str, Any], source: str = "the state") -> None:
        if self.shared:
            self.bandit.restore(state, source)

    def absorb(self, gain: Mapping[str, Any]) -> None:
        if self.shared:
            self.bandit.absorb(gain)

    def learned(self) -> list[dict[str, Any]] | None:
        if not self.shared:
            return None
        rows = self.bandit.frame().drop(columns="preference").to_dict("records")
        return [{str(k): None if v != v else v for k, v in row.items()} for row in rows]

    def of(self, slot: int) -> Bandit:
        """The bandit that chooses for `slot`."""
        return self.bandit if self.shared else self._bandits[slot]


def build_bandit(settings: BanditSettings) -> Bandit:
    """The bandit that `settings` describe, with the saved state that they name.

    Raises:
        UserError: there is no such state, or it is of another bandit.
    """
    labels = distinct_labels(settings.arms)
    # What is learned outlives a cost that is measured anew, and another place of a head.
    arms_as_learned = [costless(arm) for arm in settings.arms]
    ids = list(dict.fromkeys(identity(arm, placeless=True) for arm in arms_as_learned))
    shared: dict[str, Any] = {
        "reward": settings.reward,
        "names": list(labels.values()),
        "ids": ids if len(ids) == len(labels) else list(labels),
    }
    arms, longest = len(settings.arms), settings.depth
    bandit: Bandit
    if settings.rule == "ucb":
        confidence, exploration = settings.confidence, settings.exploration
        bandit = UCBSpec(arms, longest, confidence=confidence, exploration=exploration, **shared)
    else:
        kind = EXP3Spec if settings.rule == "exp3" else Thompson
        bandit = kind(arms, longest, seed=settings.seed, **shared)
    if settings.state is not None:
        path = find_state(settings.state)
        bandit.restore(load_state(path), str(path))
    return bandit
