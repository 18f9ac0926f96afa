"""A bandit chooses a drafter for every round of a slot (BanditSpec, Hou et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

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
    and all requests. Otherwise each request has a copy of it.

    A round's time is the time of the target's forward, which the slots of a batch share, and the
    time that the slot's arm drafts. An arm that drafts together with other arms counts its share of
    the forwards.
    """

    def __init__(self, settings: BanditSettings, resources: Resources) -> None:
        super().__init__(settings.arms, resources)
        self.bandit = build_bandit(settings)
        self.memory = self.bandit if settings.memory == "all" else None
        self._bandits: dict[int, Bandit] = {}  # by slot, where each request has its own

    def open(self, sequences: Sequence[SlotState]) -> None:
        super().open(sequences)
        if self.memory is None:
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

    def of(self, slot: int) -> Bandit:
        """The bandit that chooses for `slot`."""
        return self._bandits[slot] if self.memory is None else self.bandit


def build_bandit(settings: BanditSettings) -> Bandit:
    """The bandit that `settings` describe, with the saved state that they name. Raises
    :class:`UserError` where there is no such state, or it is of another bandit."""
    labels = distinct_labels(settings.arms)
    # What is learned outlives a cost that is measured anew, and another place of a head.
    arms_as_learned = [costless(arm) for arm in settings.arms]
    ids = list(dict.fromkeys(identity(arm, placeless=True) for arm in arms_as_learned))
    rules: dict[str, type[Bandit]] = {"ucb": UCBSpec, "exp3": EXP3Spec, "thompson": Thompson}
    bandit = rules[settings.rule](
        len(settings.arms),
        settings.depth,
        reward=settings.reward,
        names=list(labels.values()),
        ids=ids if len(ids) == len(labels) else list(labels),
        confidence=settings.confidence,
        exploration=settings.exploration,
        seed=settings.seed,
    )
    if settings.state is not None:
        path = find_state(settings.state)
        bandit.restore(load_state(path), str(path))
    return bandit
