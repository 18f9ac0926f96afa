"""A lookup and another drafter together: the lookup where it finds enough, or both in one tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from specdec_core.config import DrafterSettings, HybridDrafter
from specdec_core.drafting.drafter import Drafter, Found, Lookup, Outcome, Resources, SlotState
from specdec_core.tokens.token_tree import ROOT, TokenTree


class Hybrid(Drafter):
    """Proposes what the lookup finds, in slots where it finds at least `min_match` of the text's
    last tokens again; the other drafter drafts for the other slots together. Or, merged, the other
    drafter drafts for all slots and what was found becomes a further branch of its tree. Extended,
    its draft goes on with what is found behind it, at no further forward of a model.

    All of this keeps the target's distribution where the drafters do: what is found depends on the
    text before it alone. The lookup learns from every round, the other drafter from its own.
    """

    def __init__(
        self,
        settings: HybridDrafter,
        resources: Resources,
        build: Callable[[DrafterSettings, Resources], Drafter],
    ) -> None:
        self.settings = settings
        lookup = build(settings.lookup, resources)
        assert isinstance(lookup, Lookup)
        self.lookup, self.otherwise = lookup, build(settings.otherwise, resources)
        self._drafted: dict[int, TokenTree] = {}  # the other drafter's own tree of a slot's round

    def prepare(self, seconds: float) -> bool:
        return self.otherwise.prepare(seconds)

    def open(self, sequences: Sequence[SlotState]) -> None:
        self.lookup.open(sequences)
        self.otherwise.open(sequences)

    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        found = [self._find(sequence) for sequence in sequences]
        self._drafted = {}
        drafting = [
            sequence
            for sequence, tree in zip(sequences, found, strict=True)
            if self.settings.merge or not tree
        ]
        if drafting:
            drafted = self.otherwise.propose(drafting)
            self._drafted = {s.slot: tree for s, tree in zip(drafting, drafted, strict=True)}
        trees = []
        for sequence, tree in zip(sequences, found, strict=True):
            own = self._drafted.get(sequence.slot)
            if own is not None:
                behind = [self._find_behind(sequence, own)] if self.settings.extend else []
                tree = merged(own, *behind, (ROOT, tree))
            trees.append(tree)
        return trees

    def arrived(self, sequences: Sequence[SlotState], trees: Sequence[TokenTree]) -> None:
        asked = [n for n, sequence in enumerate(sequences) if sequence.slot in self._drafted]
        if not asked:
            return
        drafted = [self._drafted[sequences[n].slot] for n in asked]
        self.otherwise.arrived([sequences[n] for n in asked], drafted)
        for n, own in zip(asked, drafted, strict=True):
            tree = trees[n]
            if own is not tree and own.fed is not None:
                tree.fed = len(tree)
                for node in range(own.fed, len(own)):
                    what = own.tokens[node], own.parents[node], own.origins[node]
                    tree.add(*what, own.draft_probs[node])

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        self.lookup.observe(sequence, outcome)
        drafted = self._drafted.get(sequence.slot)
        if drafted is None:
            self.otherwise.missed(sequence)
        else:
            self.otherwise.observe(*_part(sequence, outcome, drafted))

    def missed(self, sequence: SlotState) -> None:
        self.lookup.missed(sequence)
        self.otherwise.missed(sequence)

    def close(self, sequence: SlotState) -> None:
        self.lookup.close(sequence)
        self.otherwise.close(sequence)

    def _find_behind(self, sequence: SlotState, drafted: TokenTree) -> tuple[int, TokenTree]:
        """A deepest node of `drafted` and what was found behind it."""
        depths = drafted.depths()
        if not depths or max(depths) + 1 >= sequence.room:
            return ROOT, TokenTree()
        leaf = node = depths.index(max(depths))
        path: list[int] = []
        while node != ROOT:
            path.insert(0, drafted.tokens[node])
            node = drafted.parents[node]
        return leaf, self.lookup.find(sequence, path, sequence.room - len(path)).tree

    def _find(self, sequence: SlotState) -> TokenTree:
        """What was found, if it was enough."""
        if sequence.room <= 0:
            return TokenTree()
        found: Found = self.lookup.find(sequence, (), sequence.room)
        return found.tree if found.match >= self.settings.min_match else TokenTree()


def merged(drafted: TokenTree, *found: tuple[int, TokenTree]) -> TokenTree:
    """The tree `drafted` with deterministic trees in it, each below the node given with it; where
    they say the same they share nodes. The nodes of `drafted` keep their numbers."""
    if not any(len(tree) for _, tree in found):
        return drafted
    whole = replace(
        drafted,
        tokens=list(drafted.tokens),
        parents=list(drafted.parents),
        draft_probs=list(drafted.draft_probs),
        origins=list(drafted.origins),
    )
    for start, tree in found:
        places = {ROOT: start}
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            places[node] = whole.graft(places[parent], [token], tree.origins[node])
    return whole


def _part(sequence: SlotState, outcome: Outcome, drafted: TokenTree) -> tuple[SlotState, Outcome]:
    """The round as it was for `drafted` alone, whose nodes are the tree's first of those that were
    fed, and of those that came later: where the accepted path leaves it the target chose a token of
    its own."""
    if outcome.tree is drafted:
        return sequence, outcome
    fed, apart = drafted.read, outcome.tree.read - drafted.read
    own = [node for node in outcome.path if node < fed]
    own += [node - apart for node in outcome.path if node >= outcome.tree.read]
    behind = len(outcome.path) - len(own)
    text = sequence.tokens[: len(sequence.tokens) - behind]
    choices = outcome.choices[: fed + 1]
    return replace(sequence, tokens=text), Outcome(drafted, own, choices, outcome.seconds)
