"""What a length policy is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from specdec_core.base.errors import UserError
from specdec_core.config import PolicySettings, run_time

if TYPE_CHECKING:
    from specdec_core.drafting.heads.loaded import LoadedHead
    from specdec_core.drafting.policies.signals import Signals


class RecordedChains(Protocol):
    """What a draft model writes from every place of recorded texts where a round may begin, of
    which there are T."""

    @property
    def agreeing(self) -> np.ndarray:
        """How many candidates in a row would be accepted (T,)."""

    def drafted(self, rule: Rule) -> np.ndarray:
        """How many candidates `rule` would draft, as if a round had no other bound (T,)."""


def build_policy(settings: PolicySettings, load_head: Callable[[str], LoadedHead]) -> LengthPolicy:
    """The policy that decodes by `settings`; `load_head` finds a trained head by its name.

    Raises:
        UserError: nothing that decodes can follow it.
    """
    built: LengthPolicy = run_time(settings)(settings, *map(load_head, settings.heads))
    return built


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """What became of a round's candidates, which follow each other."""

    drafted: int
    accepted: int  # the first ones
    draft_calls: int  # forwards of the draft model that the round took


class LengthPolicy:
    """Answers for all slots at once, and may learn from a round's outcome."""

    needs_hidden = False
    # Which values of the signals `go_on` reads: they come from the device with the tokens.
    reads: Sequence[str] = ()
    # Learns from its candidates: `go_on` sees each of them, also where nobody asks for the answer
    # any more because the round is at its limit or the text at its end.
    learns = False
    # May want no candidates for many rounds: until it does, the draft need not read the text.
    rests = False

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @classmethod
    def replayed(cls, settings: Any, *heads: LoadedHead) -> LengthPolicy:
        """The policy as a replay follows it."""
        return cls(settings, *heads)

    def lengths(self, draft: RecordedChains) -> np.ndarray | None:
        """How many candidates it would draft from every start of a recording (T,), as if a round
        had no other bound; None where that depends on the rounds before."""
        return None

    def limit(self, slot: int, batch: int = 1) -> int:
        """Candidate tokens at most in the coming round of `slot`, which `batch` requests share;
        asked once, as it begins."""
        return int(self.settings.max_tokens)

    def go_on(self, signals: Signals) -> Sequence[bool]:
        """For each slot, whether to draft another candidate."""
        return [True] * len(signals.slots)

    def observe(self, slot: int, outcome: PolicyOutcome) -> None:
        """A round of `slot` was verified, and its request goes on."""

    def reset(self, slot: int) -> None:
        """`slot` begins a new request."""


class Rule(LengthPolicy):
    """A policy that decides from the candidates of the round alone.

    Every candidate has a value; the round stops behind the first one whose value, or with
    `cumulative` the product of the round's values so far, `stops`. No memory reaches beyond the
    round, so that a replay can evaluate all rounds of a trace at once.
    """

    cumulative = False
    min_tokens = 1
    # A candidate's value is the one of the candidate before, which is known only now.
    lagging = False

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._products: dict[int, float] = {}

    def lengths(self, draft: RecordedChains) -> np.ndarray:
        return draft.drafted(self)

    def values(self, signals: Signals) -> Sequence[float]:
        """The value (n,) of each drafted candidate."""
        raise NotImplementedError

    def stops(self, value: Any) -> Any:
        """Whether to stop at a value (a number or an array of any shape)."""
        raise NotImplementedError

    def thresholds(self, values: np.ndarray) -> np.ndarray:
        """The settings' thresholds that lie at these values."""
        return values

    def limit(self, slot: int, batch: int = 1) -> int:
        self._products[slot] = 1.0
        return super().limit(slot, batch)

    def go_on(self, signals: Signals) -> Sequence[bool]:
        answers = []
        values = self.values(signals)
        for slot, position, value in zip(signals.slots, signals.positions, values, strict=True):
            if self.lagging and position == 1:
                value = 1.0
            if self.cumulative:
                value = self._products[slot] = self._products[slot] * value
            answers.append(position < self.min_tokens or not self.stops(value))
        return answers


class HeadRule(Rule):
    """A rule that asks a trained head.

    Raises:
        UserError: the head is of a kind that answers another question.
    """

    def __init__(self, settings: Any, head: LoadedHead) -> None:
        super().__init__(settings)
        self.head = head
        if head.card.kind not in settings.head_kinds:
            raise UserError(
                f"policy.head: {settings.head} is of kind {head.card.kind}; "
                f"policy {settings.kind} needs {' or '.join(settings.head_kinds)}"
            )
