"""A lookup and another drafter: the lookup where its match is long enough, or both in one tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from specdec_core.config import AnyDrafter, AnyLookup, DrafterSettings, RecordingFacts
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.drafter import Drafter, Outcome, Resources, SlotState
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.tokens.token_tree import ROOT, TokenTree


class HybridSettings(DrafterSettings):
    """A lookup where its match is long enough, another drafter otherwise; or, merged, the other
    drafter's tree with the lookup's candidates in it."""

    kind: Literal["hybrid"] = "hybrid"
    lookup: AnyLookup = SuffixSettings()
    otherwise: AnyDrafter = DraftModelSettings()
    min_match: int = Field(
        default=2,
        ge=1,
        description="tokens found again at least, or the most that the lookup looks for",
    )
    merge: bool = False
    extend: bool = Field(default=False, description="also look up what follows the other's draft")

    @property
    def label(self) -> str:
        joint, extended = " + " if self.merge else " else ", ", extended" if self.extend else ""
        return f"{self.lookup.name}{joint}{self.otherwise.name}{extended}"

    @property
    def depth(self) -> int:
        extension = self.lookup.depth if self.extend else 0
        return max(self.lookup.depth, self.otherwise.depth + extension)

    @property
    def nodes(self) -> int:
        copied, drafted = self.lookup.nodes, self.otherwise.nodes
        drafted += copied if self.extend else 0
        return copied + drafted if self.merge else max(copied, drafted)

    @property
    def parts(self) -> tuple[DrafterSettings, ...]:
        return self.lookup, self.otherwise

    @property
    def chain(self) -> bool:
        return not self.merge and all(part.chain for part in self.parts)

    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        # Merged or extended, the lookup meets candidates of the other drafter that are rejected.
        return self.unknown_part(recording, whole or self.merge or self.extend)


class HybridDrafter(Drafter):
    """Proposes the lookup's candidates in slots where it matches at least `min_match` of the
    sequence's last tokens; the other drafter drafts for the other slots together. Merged, the other
    drafter drafts for all slots and the lookup's candidates become a further branch of its tree.
    Extended, its draft continues with a lookup after its end, without a further forward of a model.

    All of this keeps the target's distribution where the drafters do: the lookup's candidates
    depend on the sequence before them alone. The lookup learns from every round, the other drafter
    from its own.
    """

    def __init__(self, settings: HybridSettings, resources: Resources) -> None:
        self.settings = settings
        self.lookup = resources.lookup(settings.lookup)
        self.otherwise = resources.build(settings.otherwise)
        self.parts = self.lookup, self.otherwise
        longest = settings.lookup.longest_match
        self._least = settings.min_match if longest is None else min(settings.min_match, longest)
        self._drafted: dict[int, TokenTree] = {}  # the other drafter's trees of the round, by slot

    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        copied = [self._find(sequence) for sequence in sequences]
        self._drafted = {}
        drafting = [
            sequence
            for sequence, tree in zip(sequences, copied, strict=True)
            if self.settings.merge or not tree
        ]
        if drafting:
            proposed = self.otherwise.propose(drafting)
            self._drafted = {s.slot: tree for s, tree in zip(drafting, proposed, strict=True)}
        trees = []
        for sequence, tree in zip(sequences, copied, strict=True):
            drafted = self._drafted.get(sequence.slot)
            if drafted is not None:
                extension = [self._find_after(sequence, drafted)] if self.settings.extend else []
                tree = merged(drafted, *extension, (ROOT, tree))
            trees.append(tree)
        return trees

    def arrived(self, sequences: Sequence[SlotState], trees: Sequence[TokenTree]) -> None:
        drafting = [n for n, sequence in enumerate(sequences) if sequence.slot in self._drafted]
        if not drafting:
            return
        parts = [self._drafted[sequences[n].slot] for n in drafting]
        self.otherwise.arrived([sequences[n] for n in drafting], parts)
        for n, drafted in zip(drafting, parts, strict=True):
            tree = trees[n]
            if drafted is not tree and drafted.fed is not None:
                tree.fed = len(tree)
                for node in range(drafted.fed, len(drafted)):
                    token, parent = drafted.tokens[node], drafted.parents[node]
                    tree.add(token, parent, drafted.origins[node], drafted.draft_probs[node])

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        self.lookup.observe(sequence, outcome)
        drafted = self._drafted.get(sequence.slot)
        if drafted is None:
            self.otherwise.missed(sequence)
        else:
            self.otherwise.observe(*_without_lookup(sequence, outcome, drafted))

    def _find_after(self, sequence: SlotState, drafted: TokenTree) -> tuple[int, TokenTree]:
        """A deepest node of `drafted` and the lookup's candidates after it."""
        depths = drafted.depths()
        if not depths or max(depths) + 1 >= sequence.room:
            return ROOT, TokenTree()
        leaf = depths.index(max(depths))
        path = drafted.path(leaf)
        return leaf, self.lookup.find(sequence, path, sequence.room - len(path)).tree

    def _find(self, sequence: SlotState) -> TokenTree:
        """The lookup's candidates, if the match is long enough."""
        if sequence.room <= 0:
            return TokenTree()
        result = self.lookup.find(sequence, (), sequence.room)
        return result.tree if result.match >= self._least else TokenTree()


def merged(drafted: TokenTree, *branches: tuple[int, TokenTree]) -> TokenTree:
    """The tree `drafted` with deterministic `branches`, each below the node given with it. Equal
    tokens share nodes. The nodes of `drafted` keep their numbers."""
    if not any(len(tree) for _, tree in branches):
        return drafted
    whole = replace(
        drafted,
        tokens=list(drafted.tokens),
        parents=list(drafted.parents),
        draft_probs=list(drafted.draft_probs),
        origins=list(drafted.origins),
    )
    for start, tree in branches:
        places = {ROOT: start}
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            places[node] = whole.graft(places[parent], [token], tree.origins[node])
    return whole


def _without_lookup(
    sequence: SlotState, outcome: Outcome, drafted: TokenTree
) -> tuple[SlotState, Outcome]:
    """The round as if only `drafted` had been proposed. Its nodes come first among the tree's nodes
    that were fed, and first among those that arrived later. Where the accepted path leaves it, the
    target chose its own token."""
    if outcome.tree is drafted:
        return sequence, outcome
    fed, apart = drafted.read, outcome.tree.read - drafted.read
    path = [node for node in outcome.path if node < fed]
    path += [node - apart for node in outcome.path if node >= outcome.tree.read]
    rest = len(outcome.path) - len(path)
    text = sequence.tokens[: len(sequence.tokens) - rest]
    choices = outcome.choices[: fed + 1]
    return replace(sequence, tokens=text), Outcome(drafted, path, choices, outcome.seconds)
