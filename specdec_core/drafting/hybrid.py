"""A lookup and another drafter together: the lookup where it finds enough, or both in one tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from specdec_core.config import AnyDrafter, AnyLookup, DrafterSettings, RecordingFacts
from specdec_core.config.wording import clause
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.drafter import Drafter, Found, Outcome, Resources, SlotState
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.tokens.token_tree import ROOT, TokenTree


class HybridSettings(DrafterSettings):
    """A lookup where it finds enough of the text again, another drafter otherwise; or, merged, the
    other drafter's tree with the found phrase in it."""

    kind: Literal["hybrid"] = "hybrid"
    lookup: AnyLookup = SuffixSettings()
    otherwise: AnyDrafter = DraftModelSettings()
    min_match: int = Field(default=2, ge=1, description="tokens found again at least")
    merge: bool = False
    extend: bool = Field(default=False, description="also look up what follows the other's draft")

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if begun := [part.kind for part in self.otherwise.walk() if part.target_width]:
            raise ValueError(
                f"hybrid: a {begun[0]} begins with the target's tokens, what is looked up does not"
            )

    @property
    def label(self) -> str:
        joint, behind = " + " if self.merge else " else ", ", extended" if self.extend else ""
        return f"{self.lookup.name}{joint}{self.otherwise.name}{behind}"

    @property
    def sentence(self) -> str:
        otherwise = "In the same tree" if self.merge else "Otherwise"
        behind = " Its draft goes on with what is looked up behind it." if self.extend else ""
        return (
            f"{self.lookup.copies(self.min_match)} {otherwise} {clause(self.otherwise.sentence)}."
            f"{behind}"
        )

    @property
    def depth(self) -> int:
        behind = self.lookup.depth if self.extend else 0
        return max(self.lookup.depth, self.otherwise.depth + behind)

    @property
    def nodes(self) -> int:
        found, drafted = self.lookup.nodes, self.otherwise.nodes
        drafted += found if self.extend else 0
        return found + drafted if self.merge else max(found, drafted)

    @property
    def parts(self) -> tuple[DrafterSettings, ...]:
        return self.lookup, self.otherwise

    def unknown_to(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        # Found phrases meet the other drafter's candidates, or are looked up behind them.
        return self.unknown_part(recording, whole or self.merge or self.extend)


class HybridDrafter(Drafter):
    """Proposes what the lookup finds, in slots where it finds at least `min_match` of the text's
    last tokens again; the other drafter drafts for the other slots together. Or, merged, the other
    drafter drafts for all slots and what was found becomes a further branch of its tree. Extended,
    its draft goes on with what is found behind it, at no further forward of a model.

    All of this keeps the target's distribution where the drafters do: what is found depends on the
    text before it alone. The lookup learns from every round, the other drafter from its own.
    """

    def __init__(self, settings: HybridSettings, resources: Resources) -> None:
        self.settings = settings
        self.lookup = resources.lookup(settings.lookup)
        self.otherwise = resources.build(settings.otherwise)
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
