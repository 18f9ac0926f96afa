"""Drafters in a replay: recordings take the place of draft models.

A drafter is replayed by its own code. Its chains come from a recorded draft
(:class:`RecordedChain`). Where its rounds depend on no earlier round, they are known from all
places at once: a table (:class:`KnownRounds`) replaces the drafter. How recordings are made and
stored is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from specdec_core.config import DrafterSettings, PolicySettings, run_time
from specdec_core.drafting.chain import ChainInProgress, ChainModel
from specdec_core.drafting.drafter import Drafter, Resources, SlotState
from specdec_core.drafting.policies.policy import LengthPolicy, RecordedLengths, build_policy
from specdec_core.drafting.policies.signals import Signals
from specdec_core.tokens.token_tree import ROOT, TokenOrigin, TokenTree

UNKNOWN = -1  # stands for a token that is not known; equals no token


@dataclass(frozen=True)
class KnownRounds:
    """The rounds of a drafter from all T places where a round may begin: arrays (T,)."""

    drafted: np.ndarray
    accepted: np.ndarray
    draft_forwards: np.ndarray
    depth: np.ndarray
    draft_tokens: np.ndarray


class RecordedDraft(RecordedLengths, Protocol):
    """A draft model's chains and trees from all T places of recorded outputs where a round may
    begin."""

    @property
    def rooms(self) -> Sequence[int]:
        """The most candidates of a round by the end of its output and the draft's positions
        (T,)."""

    @property
    def targets(self) -> Sequence[int]:
        """The target's tokens (T,)."""

    def chain(self, start: int) -> list[int]:
        """The tokens of the chain from a start, as far as recorded."""

    def signals(self, start: int, drafted: int, new: int, calls: int) -> Signals:
        """The signals, in slot 0, of `new` candidates after the first `drafted` ones of the chain
        from a start; the chain took `calls` forwards of the draft model so far."""

    def chains(self, drafted: np.ndarray) -> KnownRounds:
        """Chains of `drafted` candidates (T,), or as many as they can have."""

    def trees(self, children: Sequence[Sequence[int]]) -> KnownRounds:
        """Greedy trees of the most likely tokens; `children` has the number of children of each
        node of each level, level 0 being the sequence's last token."""


@dataclass(frozen=True)
class RecordedResources(Resources):
    """What drafters are built from in a replay, in which slot 0 decodes alone."""

    track: Callable[[str | None], RecordedDraft] = field(kw_only=True)  # by the draft's name
    start: Callable[[], int] = field(kw_only=True)  # the place where the coming round begins

    def build(self, settings: DrafterSettings) -> Drafter:
        table = run_time(settings).recorded_rounds(settings, self)
        if table is not None:
            return TableDrafter(table, self.track(settings.drafts[0]), self.start)
        return super().build(settings)

    def policy(self, draft: str | None, settings: PolicySettings) -> LengthPolicy:
        lengths = self.lengths(draft, settings)
        if lengths is None:
            return self.built_policy(draft, settings)
        return KnownLengths(settings, lengths.tolist(), self.start)

    def lengths(self, draft: str | None, settings: PolicySettings) -> np.ndarray | None:
        """The number of candidates that a policy drafts from each start (T,), without other bounds
        of the round; None where that depends on earlier rounds."""
        return self.built_policy(draft, settings).lengths(self.track(draft))

    def built_policy(self, draft: str | None, settings: PolicySettings) -> LengthPolicy:
        """The policy itself, also one that only a replay can follow."""
        return build_policy(settings, partial(self.load_head, draft), replayed=True)

    def recorded_chain(self, draft: str | None) -> RecordedChain:
        return RecordedChain(self.track(draft), self.start)


class RecordedChain(ChainModel):
    """A recorded draft model's chains; guesses save some of its forwards and leave its tokens as
    they are."""

    def __init__(self, track: RecordedDraft, start: Callable[[], int]) -> None:
        self.track, self.start = track, start
        self._chain: list[int] = []

    def room(self, sequence: SlotState) -> int:
        return max(self.track.rooms[self.start()], 0)

    def begin(self, draft: ChainInProgress) -> None:
        self._chain = self.track.chain(self.start())

    def forward(
        self,
        drafts: Sequence[ChainInProgress],
        guesses: Sequence[TokenTree] | None,
        reads: Sequence[str],
    ) -> Signals:
        [draft] = drafts
        tree, drafted = draft.tree, len(draft.tree)
        guess = guesses[0] if guesses else TokenTree()
        accepted = len(guess.follow(self._chain[drafted:])) if guess else 0
        draft.new = [(token, None) for token in self._chain[drafted : drafted + accepted + 1]]
        tree.draft_forwards += 1
        tree.draft_tokens += 1 + len(guess)
        return self.track.signals(self.start(), drafted, len(draft.new), tree.draft_forwards)


class KnownLengths(LengthPolicy):
    """A policy with known lengths from all starts."""

    def __init__(self, settings: Any, lengths: Sequence[int], start: Callable[[], int]) -> None:
        super().__init__(settings)
        self._lengths, self._start = lengths, start

    def go_on(self, signals: Signals) -> Sequence[bool]:
        return [position < self._lengths[self._start()] for position in signals.positions]


class TableDrafter(Drafter):
    """A drafter with known rounds from all starts. Of a tree only the accepted tokens are
    recorded. The other tokens are UNKNOWN, and tokens beyond the tree's depth are siblings of its
    first node: rounds are counted alike whatever the tree's shape is."""

    def __init__(self, table: KnownRounds, track: RecordedDraft, start: Callable[[], int]) -> None:
        self.track, self.start = track, start
        columns = (
            table.drafted, table.accepted, table.depth, table.draft_forwards, table.draft_tokens
        )  # fmt: skip
        self._rounds = list(zip(*(column.tolist() for column in columns), strict=True))

    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        start = self.start()
        nodes, accepted, depth, forwards, distributions = self._rounds[start]
        tokens = list(self.track.targets[start : start + accepted])
        if depth == nodes:  # a chain, which is recorded whole
            tokens += self.track.chain(start)[accepted:nodes]
        tokens += [UNKNOWN] * (nodes - len(tokens))
        tree = TokenTree.chain(tokens, TokenOrigin.DRAFT)
        tree.parents[depth:] = [ROOT] * (nodes - depth)
        tree.draft_forwards, tree.draft_tokens = forwards, distributions
        return [tree for _ in sequences]
