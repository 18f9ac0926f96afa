"""Pre-cut: tabular Q-learning of when to stop drafting (Post-use & Pre-cut, §5.2)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import BaseModel, Field

from specdec_core.base.errors import UserError, os_reason
from specdec_core.base.files import write_atomically
from specdec_core.base.workspace import present_path
from specdec_core.config import MOST_TOKENS, MaxTokens, PricedSettings, TargetCost, parse_json
from specdec_core.drafting.policies.policy import LengthPolicy, PolicyOutcome

if TYPE_CHECKING:
    from specdec_core.drafting.policies.signals import Signals

_BINS_PER_HALVING = 2


def reward(calls: int, accepted: float, target_cost: float) -> float:
    """r = η − 1 of a round, η = useful tokens / cost (§5.2): the accepted candidates and the
    target's own token for `calls` of the draft model and a target call worth `target_cost` of
    them."""
    return (accepted + 1) / (calls + target_cost) - 1


class QTable(BaseModel, extra="forbid"):
    """Values of CONTINUE and STOP in the states (cost, expected). :meth:`save` writes what a
    policy has learned; the setting `table` names that file.

    Cost is the number of draft calls so far, 1 … `max_tokens`. Expected is the product of the
    round's confidences Π q(y), the estimate of the draft being accepted as a whole (Eq. 6), in
    `bins` logarithmic bins: bin j holds 2^(-(j+1)/2) < Π ≤ 2^(-j/2), the last one all below.

    The lists are flat, cost by cost. `rounds` counts the rounds that the table has controlled,
    `gone` and `stopped` the trials of each action in each state.
    """

    max_tokens: int = Field(ge=1)
    bins: int = Field(ge=1)
    rounds: int = Field(default=0, ge=0)
    go: list[float]
    stop: list[float]
    gone: list[int]
    stopped: list[int]

    def model_post_init(self, _: object) -> None:
        size = self.max_tokens * self.bins
        for name in ("go", "stop", "gone", "stopped"):
            values = getattr(self, name)
            if len(values) != size or not all(map(math.isfinite, values)):
                raise ValueError(f"{name} must be {size} finite numbers")

    @classmethod
    def initial(cls, settings: PreCutSettings) -> QTable:
        """Q_init. Of `continue` (D.4.3): STOP is worth what it would be if the confidence product Π
        were the chance that all k candidates are accepted, and none otherwise, (1 + k Π) / (k +
        target cost) − 1, and CONTINUE `optimism` more in every state. Of `confidence` (§6.4, "prior
        knowledge"): every candidate, drafted or to come, has the mean confidence q = Π^(1/k) as its
        chance, so STOP earns (1 + q + … + q^k) / (k + target cost) − 1 and CONTINUE what Eq. 5
        gives for the best length beyond k.

        Both take k calls for k candidates, as in a plain chain: a state does not tell how many were
        free. With reuse Π is of more than k, and values are too low until trials replace them."""
        go, stop = [], []
        for k in range(1, settings.max_tokens + 1):
            for column in range(settings.bins):
                halvings = (column + 0.5) / _BINS_PER_HALVING  # in the middle of the bin
                if settings.q_init == "confidence":
                    stopped, gone = _promised(2 ** (-halvings / k), k, settings)
                else:
                    stopped = reward(k, k * 2**-halvings, settings.cost)
                    gone = stopped + settings.optimism
                stop.append(stopped)
                go.append(gone)
        return cls(
            max_tokens=settings.max_tokens,
            bins=settings.bins,
            go=go,
            stop=stop,
            gone=[0] * len(go),
            stopped=[0] * len(go),
        )

    @classmethod
    def load(cls, path: str | Path) -> QTable:
        """Read what :meth:`save` wrote. Raises :class:`UserError` where there is no such file, or
        it is not a Q-table."""
        try:
            return parse_json(cls, Path(path).read_bytes(), f"{path}: not a Q-table")
        except OSError as error:
            raise UserError(f"{path}: no Q-table can be read: {os_reason(error)}") from None

    def save(self, path: str | Path) -> Path:
        """Write the table as JSON, whole or not at all."""
        return write_atomically(Path(path), self.model_dump_json())

    def state(self, cost: int, expected: float) -> int:
        """Index of the state after `cost` draft calls with Π q(y) = `expected`."""
        halvings = -math.log2(expected) if expected > 0 else math.inf
        column = int(min(_BINS_PER_HALVING * halvings, self.bins - 1))
        return (cost - 1) * self.bins + column

    def value(self, state: int, last: bool = False) -> float:
        """max Q(state, a) over the possible actions: only STOP after the `last` candidate."""
        if last or state >= (self.max_tokens - 1) * self.bins:
            return self.stop[state]
        return max(self.go[state], self.stop[state])


def _promised(chance: float, k: int, settings: PreCutSettings) -> tuple[float, float]:
    """The values of STOP and CONTINUE after k candidates where every candidate is accepted with
    this chance: CONTINUE drafts the best length beyond k."""
    useful = accumulate(chance**length for length in range(1, settings.max_tokens + 1))
    values = [reward(n, accepted, settings.cost) for n, accepted in enumerate(useful, start=1)]
    # Each step discounts η, and not its baseline.
    later = [settings.discount**n * (value + 1) - 1 for n, value in enumerate(values[k:], start=1)]
    return values[k - 1], max(later, default=values[k - 1])


class _Decision(NamedTuple):
    """A decision of the table in a round: the state, the number of candidates and of draft
    calls."""

    state: int
    drafted: int
    calls: int


@dataclass(slots=True)
class _ObservedRound:
    """A slot's round in progress."""

    exploration: float
    uniform: random.Random
    expected: float = 1.0
    decisions: list[_Decision] = field(default_factory=list)


class PreCutSettings(PricedSettings):
    """Tabular Q-learning of CONTINUE or STOP (Post-use & Pre-cut, §5.2 and Table 8)."""

    kind: Literal["pre_cut"] = "pre_cut"
    learning_rate: float = Field(
        default=0.1, gt=0, le=1, description="at least; 1/n at an action's n-th trial in a state"
    )
    discount: float = Field(default=0.99, ge=0, le=1, description="γ, of η alone")
    exploration: float = Field(default=0.5, ge=0, le=1, description="ε in the first round")
    exploration_decay: float = Field(default=0.98, ge=0, le=1, description="factor a round")
    optimism: float = Field(default=0.01, ge=0, description="head start of CONTINUE in Q_init")
    bins: int = Field(default=8, ge=1, le=64, description="of the confidence product, 2 a halving")
    target_cost: TargetCost = "profile"
    table: str | None = Field(default=None, description="a saved Q-table to start from")
    seed: int = Field(default=0, ge=0)
    max_tokens: MaxTokens = MOST_TOKENS
    # These are not written at their defaults, so that ids stay as they were without them.
    q_init: Literal["continue", "confidence"] = Field(
        default="continue",
        exclude_if=lambda value: value == "continue",
        description="the first table: always continues (D.4.3), or as confidences promise (§6.4)",
    )
    updates: bool = Field(
        default=True,
        exclude_if=lambda value: value is True,
        description="false: the table stays as it begins",
    )

    @property
    def remembers(self) -> bool:
        return self.updates

    @property
    def label(self) -> str:
        kept = "" if self.updates else ", Q_init"
        informed = "" if self.q_init == "continue" else " by confidence"
        return f"pre-cut{self.costing(' {:g}')}{self.up_to}{kept}{informed}"


class PreCutPolicy(LengthPolicy):
    """CONTINUE or STOP, whichever the Q-table values higher in the state (cost, expected).

    STOP after k candidates ends the episode with the reward r = η − 1 (:func:`reward`). CONTINUE
    leads to the next state without a reward. Every decision of a verified round is a trial of both
    actions (appendix D.4.3): `accepted` also tells η of having stopped at that decision. Updates
    are Eq. 5, from the last decision to the first.

    The cost counts draft calls, not candidates. A candidate that a cached phrase or another guess
    adds is free, and nothing is decided before it (Alg. 1, lines 8–10). Cached phrases after the
    chain that the target accepts are useful, too (lines 26–30). They count for the round's last
    decision, without which the target would not have read them. Two readings of the paper matter:

    - The target's own token is useful, though Eq. 7 taken literally leaves it out. Otherwise a
      round with nothing accepted has η = 0 at every length and the table cannot learn to stop at
      once, and L / MAT in Eq. 3 is the number of target calls only if MAT counts it.
    - The 1 in r is a baseline, which is not discounted: γ applies to η. Nearly every r is negative,
      and discounting those would reward a late end of a lost draft.

    The learning rate is 1 / n at an action's n-th trial in a state, and at least `learning_rate`.
    So the first trial replaces Q_init, which could otherwise keep a table from longer drafts once
    exploration has ended.

    With probability `exploration` · `exploration_decay`^round an action is taken at random. Each
    round has a separate random stream, made from `seed` and the round's number: replayed rounds
    explore as live rounds do. One table serves all slots and all requests.
    """

    settings: PreCutSettings
    learns = True
    reads = ("probability",)

    def __init__(self, settings: PreCutSettings) -> None:
        super().__init__(settings)
        self.table = QTable.initial(settings)
        self._rounds: dict[int, _ObservedRound] = {}
        if settings.table is None:
            return
        table = self.table = QTable.load(path := present_path(settings.table))
        if (table.max_tokens, table.bins) != (settings.max_tokens, settings.bins):
            raise UserError(
                f"{path}: a Q-table with max_tokens {table.max_tokens} and bins {table.bins}, but "
                f"the policy has max_tokens {settings.max_tokens} and bins {settings.bins}"
            )

    def go_on(self, signals: Signals) -> Sequence[bool]:
        table, answers = self.table, []
        for slot, position, probability, calls, free in zip(
            signals.slots,
            signals.positions,
            signals.probability,
            signals.calls,
            signals.free,
            strict=True,
        ):
            if position == 1:
                self._rounds[slot] = self._begin()
            current = self._rounds[slot]
            current.expected *= probability
            if free:
                answers.append(True)
                continue
            state = table.state(calls, current.expected)
            current.decisions.append(_Decision(state, position, calls))
            u = current.uniform.random()
            if u < current.exploration:
                answers.append(u < current.exploration / 2)
            else:
                answers.append(table.go[state] >= table.stop[state])
        return answers

    def _begin(self) -> _ObservedRound:
        number, settings = self.table.rounds, self.settings
        self.table.rounds += 1
        return _ObservedRound(
            exploration=settings.exploration * settings.exploration_decay**number,
            uniform=random.Random(settings.seed << 32 | number),
        )

    def observe(self, slot: int, outcome: PolicyOutcome) -> None:
        settings, table = self.settings, self.table
        decisions = self._rounds.pop(slot).decisions if slot in self._rounds else []
        following: _Decision | None = None
        if not settings.updates:
            return
        for decision in reversed(decisions):
            accepted = min(decision.drafted, outcome.accepted)
            if following is None:
                accepted += outcome.reused
            earned = reward(decision.calls, accepted, settings.cost)
            self._learn(table.stop, table.stopped, decision.state, earned)
            if following is not None:
                last = following.drafted >= settings.max_tokens
                later = settings.discount * (table.value(following.state, last) + 1) - 1
                self._learn(table.go, table.gone, decision.state, later)
            following = decision

    def _learn(self, values: list[float], trials: list[int], state: int, value: float) -> None:
        trials[state] += 1
        rate = max(self.settings.learning_rate, 1 / trials[state])
        values[state] += rate * (value - values[state])

    def reset(self, slot: int) -> None:
        self._rounds.pop(slot, None)
