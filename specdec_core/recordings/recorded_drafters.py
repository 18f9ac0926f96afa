"""Drafters whose draft model is a recording: they propose what it would have proposed.

A drafter that is made of others (a hybrid, a bandit) is then run itself, with these in the place of
those that need a draft model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from specdec_core.config import DraftModelDrafter, Policy
from specdec_core.drafting.build import Cascade, Drafter, PostUse, Resources
from specdec_core.drafting.cascade import GuessedChain
from specdec_core.drafting.drafter import Outcome, Sequencing
from specdec_core.drafting.policies.build import LengthPolicy
from specdec_core.drafting.policies.policy import PolicyOutcome, Rule
from specdec_core.recordings.track import Track
from specdec_core.tokens.statistics import Origin
from specdec_core.tokens.token_tree import ROOT, TokenTree

UNKNOWN = -1  # a token that the recording does not know; it is nobody's


@dataclass
class Place:
    """Which recorded prompt is being decoded, and how many tokens it has."""

    prompt: int = 0
    length: int = 0


@dataclass(frozen=True)
class RecordedResources(Resources):
    """What drafters of recorded draft models are built from."""

    track: Callable[[str | None], Track] = field(kw_only=True)
    policy: Callable[[str | None, Policy], LengthPolicy] = field(kw_only=True)
    place: Place = field(kw_only=True, default_factory=Place)


class Trail:
    """Where in a track the prompts are decoded."""

    def __init__(self, track: Track, place: Place) -> None:
        self.track, self.place = track, place
        self._firsts = track.firsts.tolist()

    def start(self, sequence: Sequencing) -> int:
        """The start of the round to come."""
        return self._firsts[self.place.prompt] + len(sequence.tokens) - self.place.length


class Chains(Trail):
    """The chains that a policy lets a recorded draft model write."""

    def __init__(self, track: Track, place: Place, policy: LengthPolicy) -> None:
        super().__init__(track, place)
        self.policy = policy

    def draft(self, sequence: Sequencing) -> tuple[list[int], int, int]:
        """What the draft model would write in the round to come, as far as it could matter; how
        much of it is drafted; and the policy's limit within the room."""
        start, limit = self.start(sequence), min(self.policy.limit(sequence.slot), sequence.room)
        most = min(limit, self._bounds[start])
        if self._lengths is not None:
            length = min(most, self._lengths[start])
        else:
            length = self.track.asked(self.policy, start, most)
        rows = self.track.window(start)[: max(most, 0)]
        return [self._tokens[row] for row in rows], length, limit

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


class Recorded(Drafter):
    """A drafter that proposes for a slot at a time."""

    def propose(self, sequences: Sequence[Sequencing]) -> list[TokenTree]:
        return [self.draft(sequence) for sequence in sequences]

    @abstractmethod
    def draft(self, sequence: Sequencing) -> TokenTree:
        """The tree of the round to come."""


class RecordedChain(Recorded):
    """A draft model's chain."""

    def __init__(self, settings: DraftModelDrafter, resources: RecordedResources) -> None:
        self.policy = resources.policy(settings.draft, settings.policy)
        self.chains = Chains(resources.track(settings.draft), resources.place, self.policy)

    def open(self, sequences: Sequence[Sequencing]) -> None:
        for sequence in sequences:
            self.policy.reset(sequence.slot)

    def draft(self, sequence: Sequencing) -> TokenTree:
        tokens, length, _ = self.chains.draft(sequence)
        tree = TokenTree.chain(tokens[:length], Origin.DRAFT)
        tree.draft_forwards = tree.draft_tokens = length
        return tree

    def observe(self, sequence: Sequencing, outcome: Outcome) -> None:
        if drafted := len(outcome.tree):
            told = PolicyOutcome(drafted, outcome.accepted, outcome.tree.draft_forwards)
            self.policy.observe(sequence.slot, told)


class RecordedTree(Recorded):
    """A greedy static tree of the draft model's most likely tokens. Of its tokens only those are
    known that are the target's, from the root on; nothing else is accepted."""

    def __init__(
        self,
        draft: str | None,
        children: Sequence[Sequence[int]],
        resources: RecordedResources,
    ) -> None:
        self.children = children
        self.parents, level = [], [ROOT]
        for counts in children:
            first = len(self.parents)
            pairs = zip(level, counts, strict=True)
            self.parents += [parent for parent, count in pairs for _ in range(count)]
            level = range(first, len(self.parents))
        track = resources.track(draft)
        self.trail = Trail(track, resources.place)
        drafts, trace = track.trees(children), track.trace
        self._nodes, self._accepted = drafts.drafted.tolist(), drafts.accepted.tolist()
        self._forwards = drafts.draft_forwards.tolist()
        self._distributions = drafts.draft_tokens.tolist()
        self._ranks = track.ranks.tolist()
        self._targets = trace.target_token[trace.trajectory].tolist()

    def draft(self, sequence: Sequencing) -> TokenTree:
        start = self.trail.start(sequence)
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


class RecordedGuesses(GuessedChain):
    """A draft model's chain with guesses about it: they take part of its forwards and leave its
    tokens as they are."""

    def __init__(self, draft: str | None, policy: Policy, resources: RecordedResources) -> None:
        self.policy = resources.policy(draft, policy)
        self.chains = Chains(resources.track(draft), resources.place, self.policy)
        self.eos_token_ids = resources.eos_token_ids
        self._lengths: dict[int, int] = {}

    def open(self, sequences: Sequence[Sequencing]) -> None:
        for sequence in sequences:
            self.policy.reset(sequence.slot)

    def propose(self, sequences: Sequence[Sequencing]) -> list[TokenTree]:
        return [self._draft(sequence) for sequence in sequences]

    def _draft(self, sequence: Sequencing) -> TokenTree:
        tokens, length, limit = self.chains.draft(sequence)
        chain = TokenTree.chain(tokens[:length], Origin.DRAFT)
        drafted = 0
        while drafted < length:
            room = limit - drafted - 1
            guess = TokenTree()
            if room > 0:
                guess = self.guess(sequence, tokens[:drafted], room)
            chain.draft_forwards += 1
            chain.draft_tokens += 1 + len(guess)
            drafted += len(follow(guess, tokens[drafted:])) + 1
        self._lengths[sequence.slot] = length
        return chain

    def observe(self, sequence: Sequencing, outcome: Outcome) -> None:
        self.judged(sequence, outcome, self._lengths[sequence.slot])


class RecordedCascade(Cascade, RecordedGuesses):
    """A recorded draft model's chain, guessed by a lookup."""


class RecordedPostUse(PostUse, RecordedGuesses):
    """A recorded draft model's chain with a token cache on both sides."""


def follow(tree: TokenTree, tokens: Sequence[int]) -> list[int]:
    """The nodes of `tree` that say what `tokens` say, from the root on."""
    if tree.is_chain:
        agreed = 0
        while agreed < min(len(tree), len(tokens)) and tree.tokens[agreed] == tokens[agreed]:
            agreed += 1
        return list(range(agreed))
    children, path, node = tree.children(), [], ROOT
    for token in tokens:
        same = (child for child in children.get(node, ()) if tree.tokens[child] == token)
        if (node := next(same, None)) is None:
            break
        path.append(node)
    return path
