"""Drafters in a replay: recordings take the place of draft models.

What a kind does in a replay is said where the kind is (:meth:`Drafter.replayed`). Here is what it
is offered there. How recordings are made and kept, drafters do not know.
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
from specdec_core.tokens.token_tree import Origin, TokenTree
from specdec_core.tokens.topology import static_tree

UNKNOWN = -1  # a token that the recording does not know; it is nobody's


@dataclass(frozen=True)
class Drafts:
    """What a drafter without memory does from every start: arrays (T,)."""

    drafted: np.ndarray
    accepted: np.ndarray
    draft_forwards: np.ndarray
    depth: np.ndarray
    draft_tokens: np.ndarray


class RecordedDraft(RecordedChains, Protocol):
    """What a draft model does from every place of recorded texts where a round may begin: T
    starts."""

    @property
    def bounds(self) -> Sequence[int]:
        """How many candidates a chain can have, up to its end and within its room (T,)."""

    @property
    def ranks(self) -> np.ndarray:
        """The rank of the target's token in the draft's distribution, 0 the most likely (T,)."""

    @property
    def targets(self) -> Sequence[int]:
        """The target's tokens (T,)."""

    def chain(self, start: int, length: int) -> list[int]:
        """The first tokens of the chain from a start."""

    def asked(self, policy: LengthPolicy, start: int, most: int) -> int:
        """How many candidates, of at most `most`, a policy drafts from a start when it is asked
        behind each of them."""

    def chains(self, drafted: np.ndarray) -> Drafts:
        """Chains of so many candidates (T,), where they can have so many."""

    def trees(self, children: Sequence[Sequence[int]]) -> Drafts:
        """Greedy trees of the most likely tokens; `children` says how many each node of each level
        has, the text's last token being level 0."""

    def walk(self, policy: LengthPolicy) -> Any:
        """The rounds of a policy's chains, one after the other."""

    def walk_all(self, drafts: Drafts) -> Any:
        """The rounds when one from any start drafts what `drafts` says."""


@dataclass(frozen=True)
class RecordedResources(Resources):
    """What drafters are built from in a replay."""

    track: Callable[[str | None], RecordedDraft] = field(kw_only=True)  # by the draft's name
    start: Callable[[SlotState], int] = field(kw_only=True)  # where the round to come begins

    def build(self, settings: DrafterSettings) -> Drafter:
        built: Drafter = run_time(settings).replayed(settings, self)
        return built

    def policy(self, draft: str | None, settings: PolicySettings) -> LengthPolicy:
        heads = (self.load_head(draft, head) for head in settings.heads)
        built: LengthPolicy = run_time(settings).replayed(settings, *heads)
        return built


class PolicyChains:
    """The chains that a policy lets a recorded draft model write."""

    def __init__(
        self, draft: str | None, policy: LengthPolicy, recorded: RecordedResources
    ) -> None:
        self.track, self.policy, self.start = recorded.track(draft), policy, recorded.start

    def draft(self, sequence: SlotState) -> tuple[list[int], int, int]:
        """What the draft model would write in the round to come, as far as it could matter; how
        much of it is drafted; and the policy's limit within the room."""
        start, limit = self.start(sequence), min(self.policy.limit(sequence.slot), sequence.room)
        most = max(min(limit, self.track.bounds[start]), 0)
        if self._lengths is not None:
            length = min(most, self._lengths[start])
        else:
            length = self.track.asked(self.policy, start, most)
        return self.track.chain(start, most), length, limit

    @cached_property
    def _lengths(self) -> list[int] | None:
        """Where they depend on nothing before, all at once."""
        lengths = self.policy.lengths(self.track)
        return None if lengths is None else lengths.tolist()


class Recorded(Drafter):
    """A drafter that proposes for a slot at a time."""

    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        return [self.draft(sequence) for sequence in sequences]

    @abstractmethod
    def draft(self, sequence: SlotState) -> TokenTree:
        """The tree of the round to come."""


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


class RecordedTree(Recorded):
    """A greedy static tree of the draft model's most likely tokens. Of its tokens only those are
    known that are the target's, from the root on; nothing else is accepted."""

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
            [Origin.DRAFT] * nodes,
            self._forwards[start],
            self._distributions[start],
        )
