"""The interface of length policies."""

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


class RecordedLengths(Protocol):
    """A draft model's chains from all T places of recorded outputs where a round may begin."""

    @property
    def agreeing(self) -> np.ndarray:
        """The number of candidates of each chain that would be accepted (T,)."""

    def drafted(self, rule: Rule) -> np.ndarray:
        """The number of candidates that `rule` drafts, without other bounds of the round (T,)."""


def build_policy(
    settings: PolicySettings, load_head: Callable[[str], LoadedHead], replayed: bool = False
) -> LengthPolicy:
    """The policy that decodes by `settings`, or is `replayed`; `load_head` finds a trained head by
    its name. Raises :class:`UserError` where only a replay can follow it."""
    if not (settings.decodes or replayed):
        raise UserError(
            f"policy.kind: {settings.kind} knows what the target will write, which only a replay of"
            " a recording does"
        )
    from specdec_core.drafting.policies.signals import MEASURED  # torch

    built: LengthPolicy = run_time(settings)(settings, *map(load_head, settings.heads))
    if unknown := [name for name in built.reads if name not in MEASURED]:
        raise UserError(
            f"policy.kind: {settings.kind}: reads {', '.join(unknown)}, but what is copied with the"
            f" tokens is {', '.join(MEASURED)}"
        )
    return built


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """The verdict on a round's chain of candidates."""

    drafted: int
    accepted: int  # the first ones
    draft_calls: int  # forwards of the draft model that the round took
    reused: int = 0  # accepted tokens after the chain that took no draft, such as cached phrases


class LengthPolicy:
    """Decides for all slots at once, and may learn from a round's outcome."""

    needs_hidden = False
    # The values of the signals that `go_on` reads; they are copied from the device with the tokens.
    reads: Sequence[str] = ()
    # Learns from its candidates: `go_on` sees each of them, also where its answer is not needed
    # because the round is at its limit or the sequence at its end.
    learns = False

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def lengths(self, draft: RecordedLengths) -> np.ndarray | None:
        """The number of candidates that it drafts from every start of a recording (T,), without
        other bounds of the round; None where that depends on earlier rounds."""
        return None

    def limit(self, slot: int) -> int:
        """The most candidate tokens in the coming round of `slot`; called once a round, at its
        beginning."""
        return int(self.settings.max_tokens)

    def go_on(self, signals: Signals) -> Sequence[bool]:
        """For each slot, whether to draft another candidate."""
        return [True] * len(signals.slots)

    def observe(self, slot: int, outcome: PolicyOutcome) -> None:
        """A round of `slot` was verified, and its request continues."""

    def reset(self, slot: int) -> None:
        """`slot` begins a new request."""


class Rule(LengthPolicy):
    """A policy that decides from the candidates of the round alone.

    Every candidate has a value. The round stops after the first candidate where its value, or with
    `cumulative` the product of the round's values so far, `stops`: by default, where the one signal
    that it `reads` is below the threshold. A rule has no memory beyond the round, so a replay can
    evaluate all rounds of a trace at once.
    """

    cumulative = False
    min_tokens = 1
    # The values at a candidate belong to the candidate before; they are known only now.
    lagging = False
    # Settings that its own `values` do not read: they change no value of a replay.
    apart: Sequence[str] = ()

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._products: dict[int, float] = {}

    def lengths(self, draft: RecordedLengths) -> np.ndarray:
        return draft.drafted(self)

    def values(self, signals: Signals) -> Sequence[float]:
        """The value (n,) of each drafted candidate."""
        [name] = self.reads
        values: Sequence[float] = getattr(signals, name)
        return values

    def stops(self, value: Any) -> Any:
        """Whether to stop at a value (a number or an array of any shape)."""
        return value < self.settings.threshold

    def limit(self, slot: int) -> int:
        self._products[slot] = 1.0
        return super().limit(slot)

    def go_on(self, signals: Signals) -> Sequence[bool]:
        before = [self._products[slot] for slot in signals.slots] if self.cumulative else ()
        answers, products = self.judge(signals, before)
        self._products.update(zip(signals.slots, products, strict=False))
        return answers

    def judge(self, signals: Signals, before: Sequence[float]) -> tuple[list[bool], list[float]]:
        """For each of n candidates whether to draft after it, and the product of the values up to
        it; `before` (n,) has the products up to the candidates before. Without `cumulative` there
        are no products."""
        answers, products = [], []
        for n, value in enumerate(self.values(signals)):
            position = signals.positions[n]
            if self.lagging and position == 1:
                value = 1.0
            if self.cumulative:
                value = before[n] * value
                products.append(value)
            answers.append(bool(position < self.min_tokens or not self.stops(value)))
        return answers, products


class HeadRule(Rule):
    """A rule that uses a trained head. Raises :class:`UserError` where the head is of a kind that
    this rule cannot use."""

    apart = ("threshold", "max_tokens", "min_tokens")

    def __init__(self, settings: Any, head: LoadedHead) -> None:
        super().__init__(settings)
        self.head = head
        if head.card.kind not in settings.head_kinds:
            raise UserError(
                f"policy.head: {settings.head} is of kind {head.card.kind}; "
                f"policy {settings.kind} needs {' or '.join(settings.head_kinds)}"
            )
