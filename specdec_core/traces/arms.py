"""Drafters whose draft model is a recording: they propose what it would have proposed.

A drafter that is made of others (a hybrid, a bandit) is then run itself, with these in the place of
those that need a draft model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from specdec_core.drafters import Drafter, Outcome, Sequencing
from specdec_core.policies import LengthPolicy, Rule
from specdec_core.stats import Origin
from specdec_core.token_tree import ROOT, TokenTree
from specdec_core.traces.track import Drafts, Track

UNKNOWN = -1  # a token that the recording does not know; it is nobody's


class Place:
    """Which recorded prompt is being decoded."""

    def __init__(self) -> None:
        self.prompt, self.length = 0, 0

    def enter(self, prompt: int, length: int) -> None:
        """Decoding begins behind the `length` tokens of a prompt."""
        self.prompt, self.length = prompt, length


class Recorded(Drafter):
    """A drafter of a recorded draft model."""

    def __init__(self, track: Track, place: Place) -> None:
        self.track, self.place = track, place
        self._firsts = track.firsts.tolist()

    def start(self, sequence: Sequencing) -> int:
        """The start in `track` of the round to come."""
        return self._firsts[self.place.prompt] + len(sequence.tokens) - self.place.length

    def propose(self, sequences: Sequence[Sequencing]) -> list[TokenTree]:
        return [self.draft(s, self.start(s)) for s in sequences]

    @abstractmethod
    def draft(self, sequence: Sequencing, start: int) -> TokenTree:
        """The tree of a round from `start`."""


class RecordedChain(Recorded):
    """A chain, as long as its policy makes it."""

    def __init__(self, track: Track, place: Place, policy: LengthPolicy) -> None:
        super().__init__(track, place)
        self.policy = policy

    def open(self, sequences: Sequence[Sequencing]) -> None:
        for sequence in sequences:
            self.policy.reset(sequence.slot)

    def draft(self, sequence: Sequencing, start: int) -> TokenTree:
        limit = min(self.policy.limit(sequence.slot), sequence.room, self._bounds[start])
        if self._lengths is not None:
            length = min(limit, self._lengths[start])
        else:
            length = self.track.asked(self.policy, start, limit)
        rows = self.track.window(start)[:length]
        tree = TokenTree.chain([self._tokens[row] for row in rows], Origin.DRAFT)
        tree.draft_forwards = tree.draft_tokens = length
        return tree

    def observe(self, sequence: Sequencing, outcome: Outcome) -> None:
        if drafted := len(outcome.tree):
            self.policy.observe(sequence.slot, drafted, outcome.accepted)

    @cached_property
    def _lengths(self) -> list[int] | None:
        """Of a rule, all at once."""
        rule = self.policy
        return self.track.drafted(rule).tolist() if isinstance(rule, Rule) else None

    @cached_property
    def _bounds(self) -> list[int]:
        return self.track.bound.tolist()

    @cached_property
    def _tokens(self) -> list[int]:
        return self.track.trace.draft_token.tolist()


class RecordedTree(Recorded):
    """A greedy static tree. Of its tokens only those are known that are the target's, from the
    root on; nothing else is accepted."""

    def __init__(self, track: Track, place: Place, children: Sequence[Sequence[int]]) -> None:
        super().__init__(track, place)
        self.children = children
        parents, level = [], [ROOT]
        for counts in children:
            for parent, count in zip(level, counts, strict=True):
                parents += [parent] * count
            level = list(range(len(parents) - sum(counts), len(parents)))
        self._parents = parents
        self._drafts = _as_lists(track.trees(children))

    def draft(self, sequence: Sequencing, start: int) -> TokenTree:
        nodes, accepted, forwards, depth, distributions = (own[start] for own in self._drafts)
        assert sequence.room >= depth, "a static tree that is cut further was not recorded"
        tokens, at = [UNKNOWN] * nodes, 0  # place in its level
        begin = 0
        for level in range(accepted):
            counts = self.children[level]
            at = sum(counts[:at]) + self._ranks[start + level]
            tokens[begin + at] = self._targets[start + level]
            begin += sum(counts)
        return TokenTree(
            tokens,
            self._parents[:nodes],
            [None] * nodes,
            [Origin.DRAFT] * nodes,
            draft_forwards=forwards,
            draft_tokens=distributions,
        )

    @cached_property
    def _ranks(self) -> list[int]:
        return self.track.ranks.tolist()

    @cached_property
    def _targets(self) -> list[int]:
        trace = self.track.trace
        return trace.target_token[trace.trajectory].tolist()


def _as_lists(drafts: Drafts) -> tuple[list[int], ...]:
    arrays = (
        drafts.drafted,
        drafts.accepted,
        drafts.draft_forwards,
        drafts.depth,
        drafts.draft_tokens,
    )
    return tuple(np.asarray(array).tolist() for array in arrays)
