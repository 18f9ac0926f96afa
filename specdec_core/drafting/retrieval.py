"""Retrieval: the most frequent continuations of the sequence's last tokens in a datastore, as a
tree (REST, He et al., 2024)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from specdec_core.config import LookupSettings, MaxTokens, Width
from specdec_core.drafting.datastores.datastore import open_datastore
from specdec_core.drafting.drafter import Lookup, LookupResult, Resources, SlotState
from specdec_core.tokens.token_tree import ROOT, TokenOrigin, TokenTree

SAMPLE = 64  # matches with their continuations that are read


class RetrievalSettings(LookupSettings):
    """What followed the sequence's last tokens in a datastore, as a tree of the most frequent
    continuations (REST, He et al., 2024)."""

    kind: Literal["retrieval"] = "retrieval"
    datastore: str = Field(description="name or folder of a datastore; `specdec datastore` builds")
    min_match: int = Field(default=1, ge=1)
    max_match: int = Field(default=16, ge=1)
    keep: Width = Field(default=16, description="nodes that are sent to verification")
    max_tokens: MaxTokens = 10

    def model_post_init(self, _: Any) -> None:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} exceeds max_match {self.max_match}")

    @property
    def label(self) -> str:
        size = "" if self.max_tokens == 10 else f" {self.max_tokens}"
        return f"retrieval {Path(self.datastore).name}{size}"

    @property
    def depth(self) -> int:
        return self.max_tokens

    @property
    def nodes(self) -> int:
        return self.keep

    @property
    def datastores(self) -> tuple[str, ...]:
        return (self.datastore,)

    @property
    def chain(self) -> bool:
        return False


class RetrievalDrafter(Lookup):
    """Proposes the most frequent continuations of the longest suffix of the sequence that is in the
    datastore. Proposals are deterministic, one-hot draft distributions."""

    def __init__(self, settings: RetrievalSettings, resources: Resources) -> None:
        self.settings = settings
        digest = resources.tokenizer_digest() if resources.tokenizer_digest else None
        self.datastore = open_datastore(settings.datastore, digest)

    def find(self, sequence: SlotState, drafted: Sequence[int], room: int) -> LookupResult:
        settings = self.settings
        text = [*sequence.tokens[-settings.max_match :], *drafted]
        matches = self.datastore.longest(text, settings.min_match, settings.max_match)
        if not matches:
            return LookupResult(TokenTree())
        depth = min(room, settings.max_tokens)
        places = self.datastore.continuations(matches, depth, SAMPLE)
        separator = self.datastore.card.separator
        return LookupResult(most_frequent(places, settings.keep, separator), matches.length)


def most_frequent(places: Sequence[Sequence[int]], nodes: int, separator: int) -> TokenTree:
    """The `nodes` most frequent nodes of the trie of continuations, siblings in this order; of
    equally frequent ones the less deep first. `places[d][i]` is the token at depth d of
    continuation i; the continuations are in lexicographic order and end at a `separator`, the
    largest token."""
    tree = TokenTree()
    # A node's continuations are neighbours, first … end − 1, and each child has a run of them.
    queue: list[tuple[int, int, int, int, int]] = []  # −count, depth, first, end, parent

    def split(parent: int, depth: int, first: int, end: int) -> None:
        if depth == len(places):
            return
        tokens = places[depth]
        while first < end and tokens[first] != separator:
            after = bisect_right(tokens, tokens[first], first, end)
            heappush(queue, (first - after, depth, first, after, parent))
            first = after

    split(ROOT, 0, 0, len(places[0]) if places else 0)
    while queue and len(tree) < nodes:
        _, depth, first, end, parent = heappop(queue)
        node = tree.add(places[depth][first], parent, TokenOrigin.RETRIEVAL)
        split(node, depth + 1, first, end)
    return tree
