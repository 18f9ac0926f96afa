"""Drafters in a replay: recordings take the place of draft models.

Each kind of drafter says how it is replayed (:meth:`Drafter.replayed`). This module has what it is
replayed from. How recordings are made and stored is not known here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from specdec_core.config import DrafterSettings, PolicySettings, run_time
from specdec_core.drafting.drafter import Drafter, Resources, SlotState
from specdec_core.drafting.policies.policy import LengthPolicy, RecordedChains
from specdec_core.tokens.token_tree import TokenOrigin, TokenTree
from specdec_core.tokens.topology import static_tree

UNKNOWN = -1  # stands for a token that was not recorded; equals no token


@dataclass(frozen=True)
class Drafts:
    """The rounds of a drafter without memory from every start: arrays (T,)."""

    drafted: np.ndarray
    accepted: np.ndarray
    draft_forwards: np.ndarray
    depth: np.ndarray
    draft_tokens: np.ndarray


class RecordedDraft(RecordedChains, Protocol):
    """A draft model's chains and trees from all T places of recorded texts where a round may
    begin."""

    @property
    def bounds(self) -> Sequence[int]:
        """The most candidates that a chain can have, by its recording and its room (T,)."""

    @property
    def rooms(self) -> Sequence[int]:
        """The most candidates of a round by the end of its text and the draft's positions (T,)."""

    @property
    def ranks(self) -> np.ndarray:
        """The rank of the target's token in the draft's distribution, 0 the most likely (T,)."""

    @property
    def targets(self) -> Sequence[int]:
        """The target's tokens (T,)."""

    def chain(self, start: int, length: int) -> list[int]:
        """The first `length` tokens of the chain from a start."""

    def drafted_by(self, policy: LengthPolicy, start: int, most: int) -> int:
        """How many candidates, at most `most`, a policy drafts from a start when it is asked after
        each of them."""

    def answer(
        self, policy: LengthPolicy, start: int, drafted: int, calls: int, free: bool
    ) -> bool:
        """Whether a policy goes on after `drafted` candidates from a start, which took `calls`
        forwards of the draft model; `free`: the next one takes none."""

    def chains(self, drafted: np.ndarray) -> Drafts:
        """Chains of `drafted` candidates (T,), or as many as they can have."""

    def trees(self, children: Sequence[Sequence[int]]) -> Drafts:
        """Greedy trees of the most likely tokens; `children` has the number of children of each
        node of each level, level 0 being the text's last token."""

    def walk(self, policy: LengthPolicy) -> Any:
        """The rounds of a policy's chains, simulated one after the other."""

    def walk_all(self, drafts: Drafts) -> Any:
        """The rounds when each drafts what `drafts` has for its start."""

    def everywhere(self, drafts: Drafts) -> Any:
        """The rounds from all starts."""


@dataclass(frozen=True)
class RecordedResources(Resources):
    """What drafters are built from in a replay."""

    track: Callable[[str | None], RecordedDraft] = field(kw_only=True)  # by the draft's name
    start: Callable[[SlotState], int] = field(kw_only=True)  # of the coming round

    def build(self, settings: DrafterSettings) -> Drafter:
        built: Drafter = run_time(settings).replayed(settings, self)
        return built

    def policy(self, draft: str | None, settings: PolicySettings) -> LengthPolicy:
        heads = (self.load_head(draft, head) for head in settings.heads)
        built: LengthPolicy = run_time(settings).replayed(settings, *heads)
        return built


class PolicyChains:
    """The chains of a recorded draft model under a policy."""

    def __init__(
        self, draft: str | None, policy: LengthPolicy, recorded: RecordedResources
    ) -> None:
        self.track, self.policy, self.start = recorded.track(draft), policy, recorded.start

    def draft(self, sequence: SlotState) -> tuple[list[int], int, int]:
        """The draft model's tokens in the coming round up to its limit; how many of them are
        drafted; and the policy's limit within the room."""
        start, most, limit = self._round(sequence)
        if self._lengths is not None:
            length = min(most, self._lengths[start])
        else:
            length = self.track.drafted_by(self.policy, start, most)
        return self.track.chain(start, most), length, limit

    def asked(self, sequence: SlotState) -> tuple[list[int], Callable[[int, int, bool], bool], int]:
        """For chains of which a forward may bring several tokens: the draft model's tokens in the
        coming round, as many as there can be; whether another is drafted after so many, which took
        so many forwards, the next one being free or not; and the policy's limit in the room."""
        start, most, limit = self._round(sequence)
        asks = self._lengths is None
        if self._lengths is not None:
            most = min(most, self._lengths[start])

        def goes_on(drafted: int, calls: int, free: bool) -> bool:
            last = drafted == most
            if not asks or (last and not self.policy.learns):
                return not last
            return self.track.answer(self.policy, start, drafted, calls, free) and not last

        return self.track.chain(start, most), goes_on, limit

    def _round(self, sequence: SlotState) -> tuple[int, int, int]:
        """Where the coming round begins, the most candidates that are known there, and the policy's
        limit within the room."""
        start = self.start(sequence)
        limit = min(self.policy.limit(sequence.slot), self.track.rooms[start])
        return start, max(min(limit, self.track.bounds[start]), 0), limit

    @cached_property
    def _lengths(self) -> list[int] | None:
        """All lengths at once, where they do not depend on earlier rounds."""
        lengths = self.policy.lengths(self.track)
        return None if lengths is None else lengths.tolist()


class Recorded(Drafter):
    """A drafter that proposes for one slot at a time."""

    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        return [self.draft(sequence) for sequence in sequences]

    @abstractmethod
    def draft(self, sequence: SlotState) -> TokenTree:
        """The tree of the coming round."""


class ShapedTree(Drafter):
    """A drafter of trees that are all of one shape when greedy, `settings.children` of the draft
    model's most likely tokens: a recording has their ranks."""

    @classmethod
    def replayed(cls, settings: Any, recorded: RecordedResources) -> RecordedTree:
        return RecordedTree(settings.draft, settings.children, recorded)

    @classmethod
    def replayed_at_once(cls, settings: Any, recorded: RecordedResources) -> Any:
        track = recorded.track(settings.draft)
        return track.walk_all(track.trees(settings.children))

    @classmethod
    def replayed_everywhere(cls, settings: Any, recorded: RecordedResources) -> Any:
        track = recorded.track(settings.draft)
        return track.everywhere(track.trees(settings.children))


class RecordedTree(Recorded):
    """A greedy static tree of the draft model's most likely tokens. Only the accepted ones are
    known; the others are UNKNOWN."""

    def __init__(
        self, draft: str | None, children: Sequence[Sequence[int]], recorded: RecordedResources
    ) -> None:
        self.children = children
        self.parents = static_tree(children)
        track, self.start = recorded.track(draft), recorded.start
        drafts = track.trees(children)
        self._nodes, self._accepted = drafts.drafted.tolist(), drafts.accepted.tolist()
        self._forwards = drafts.draft_forwards.tolist()
        self._distributions = drafts.draft_tokens.tolist()
        self._ranks, self._targets = track.ranks.tolist(), track.targets

    def draft(self, sequence: SlotState) -> TokenTree:
        start = self.start(sequence)
        nodes = self._nodes[start]
        tokens, begin, place = [UNKNOWN] * nodes, 0, 0
        for level in range(self._accepted[start]):
            counts = self.children[level]
            place = sum(counts[:place]) + self._ranks[start + level]
            tokens[begin + place] = self._targets[start + level]
            begin += sum(counts)
        return TokenTree(
            tokens,
            self.parents[:nodes],
            [None] * nodes,
            [TokenOrigin.DRAFT] * nodes,
            self._forwards[start],
            self._distributions[start],
        )
