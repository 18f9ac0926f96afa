"""A lookup and another drafter together: the lookup where it finds enough, or both in one tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from specdec_core.config import DrafterSettings, HybridDrafter
from specdec_core.drafters.base import Drafter, Found, Lookup, Outcome, Resources, Sequencing
from specdec_core.token_tree import ROOT, TokenTree


class Hybrid(Drafter):
    """Proposes what the lookup finds, in slots where it finds at least `min_match` of the text's
    last tokens again; the other drafter drafts for the other slots together. Or, merged, the other
    drafter drafts for all slots and what was found becomes a further branch of its tree.

    Either keeps the target's distribution where the drafters do: what was found depends on the
    text alone. The lookup learns from every round, the other drafter from its own.
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

    def open(self, sequences: Sequence[Sequencing]) -> None:
        self.lookup.open(sequences)
        self.otherwise.open(sequences)

    def propose(self, sequences: Sequence[Sequencing]) -> list[TokenTree]:
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
            trees.append(tree if own is None else merged(own, tree))
        return trees

    def observe(self, sequence: Sequencing, outcome: Outcome) -> None:
        self.lookup.observe(sequence, outcome)
        drafted = self._drafted.get(sequence.slot)
        if drafted is not None:
            self.otherwise.observe(*_part(sequence, outcome, drafted))

    def close(self, sequence: Sequencing) -> None:
        self.lookup.close(sequence)
        self.otherwise.close(sequence)

    def _find(self, sequence: Sequencing) -> TokenTree:
        """What was found, if it was enough."""
        if sequence.room <= 0:
            return TokenTree()
        found: Found = self.lookup.find(sequence, (), sequence.room)
        return found.tree if found.match >= self.settings.min_match else TokenTree()


def merged(drafted: TokenTree, found: TokenTree) -> TokenTree:
    """The tree `drafted` with the deterministic tree `found` in it; where both say the same they
    share nodes. The nodes of `drafted` keep their numbers."""
    if not found:
        return drafted
    tree = replace(
        drafted,
        tokens=list(drafted.tokens),
        parents=list(drafted.parents),
        draft_probs=list(drafted.draft_probs),
        origins=list(drafted.origins),
    )
    places = {ROOT: ROOT}
    for node, (token, parent) in enumerate(zip(found.tokens, found.parents, strict=True)):
        places[node] = tree.graft(places[parent], [token], found.origins[node])
    return tree


def _part(sequence: Sequencing, outcome: Outcome, drafted: TokenTree) -> tuple[Sequencing, Outcome]:
    """The round as it was for `drafted` alone, whose nodes are the tree's first: where the accepted
    path leaves it the target chose a token of its own."""
    if outcome.tree is drafted:
        return sequence, outcome
    own = [node for node in outcome.path if node < len(drafted)]
    behind = len(outcome.path) - len(own)
    text = sequence.tokens[: len(sequence.tokens) - behind]
    choices = outcome.choices[: len(drafted) + 1]
    return replace(sequence, tokens=text), Outcome(drafted, own, choices, outcome.seconds)
